/* Changes to a whole tiny model (Llama, 1 layer, C 32, F 48, V 10, tied, down_proj in NF4) that must be
 * refused: {name, tensor, change, dtype, ndim, shape, message}. */
#define P "model.layers.0."
#define D P "mlp.down_proj.weight"
static const bad_tensor bad_tensors[] = {
    {"no embedding", "model.embed_tokens.weight", GONE, 0, 0, {0}, "tensor 'model.embed_tokens.weight' is missing"},
    {"no norm", P "input_layernorm.weight", GONE, 0, 0, {0}, "is missing (config.json asks for it)"},
    {"no q_proj", P "self_attn.q_proj.weight", GONE, 0, 0, {0}, "'" P "self_attn.q_proj.weight' is missing"},
    {"embedding resized", "model.embed_tokens.weight", CHANGED, QL_BF16, 2, {12, 32},
     "has shape [12, 32], config.json asks for [10, 32] (a resized embedding? vocab_size must be its number of rows)"},
    {"q_proj transposed", P "self_attn.k_proj.weight", CHANGED, QL_BF16, 2, {32, 16},
     "'" P "self_attn.k_proj.weight' has shape [32, 16], config.json asks for [16, 32]"},
    {"q_proj flat", P "self_attn.q_proj.weight", CHANGED, QL_BF16, 1, {1024}, "has shape [1024], config.json asks for [32, 32]"},
    {"norm too long", "model.norm.weight", CHANGED, QL_BF16, 1, {33}, "'model.norm.weight' has shape [33], config.json asks for [32]"},
    {"norm is a matrix", "model.norm.weight", CHANGED, QL_BF16, 2, {1, 32}, "has shape [1, 32], config.json asks for [32]"},
    {"norm of integers", "model.norm.weight", CHANGED, QL_I32, 1, {32}, "has dtype int32; supported here: float32"},
    {"int8 weights", P "self_attn.q_proj.weight", CHANGED, QL_I8, 2, {32, 32}, "is int8: an 8-bit base is not supported"},
    {"bytes without a state", P "self_attn.q_proj.weight", CHANGED, QL_U8, 2, {512, 1},
     "is uint8, but has no quant_state.bitsandbytes__nf4 or __fp4"},
    {"a bias nobody asked for", P "self_attn.q_proj.bias", ADDED, QL_BF16, 1, {32},
     "'" P "self_attn.q_proj.bias' is not part of a LlamaForCausalLM of 1 layers"},
    {"a second layer", "model.layers.1.mlp.up_proj.weight", ADDED, QL_BF16, 2, {48, 32}, "is not part of a LlamaForCausalLM"},
    {"both states", D ".quant_state.bitsandbytes__fp4", ADDED, QL_U8, 1, {4}, "has both an nf4 and an fp4 quant_state"},
    {"quant_state of floats", D ".quant_state.bitsandbytes__nf4", CHANGED, QL_F32, 1, {4}, "must be at most 4096 bytes of uint8"},
    {"quant_state too long", D ".quant_state.bitsandbytes__nf4", CHANGED, QL_U8, 1, {5000}, "must be at most 4096 bytes of uint8"},
    {"quant_state of zeros", D ".quant_state.bitsandbytes__nf4", CHANGED, QL_U8, 1, {40}, "bad JSON"},
    {"packed too short", D, CHANGED, QL_U8, 2, {767, 1}, "has 767 bytes; [32, 48] in 4 bits needs 768"},
    {"no absmax", D ".absmax", GONE, 0, 0, {0}, "'" D ".absmax' is missing (the weight is quantised)"},
    {"absmax too short", D ".absmax", CHANGED, QL_U8, 1, {23}, "has 23 elements of uint8, expected 24 of uint8"},
    {"absmax of floats", D ".absmax", CHANGED, QL_F32, 1, {24}, "has 24 elements of float32, expected 24 of uint8"},
    {"no quant_map", D ".quant_map", GONE, 0, 0, {0}, "quant_map' is missing"},
    {"quant_map of 15", D ".quant_map", CHANGED, QL_F32, 1, {15}, "has 15 elements of float32, expected 16"},
    {"nested_absmax too long", D ".nested_absmax", CHANGED, QL_F32, 1, {2}, "has 2 elements of float32, expected 1"},
    {"no nested map", D ".nested_quant_map", GONE, 0, 0, {0}, "nested_quant_map' is missing"},
};

/* Texts of the quant_state of down_proj. */
#define S "\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"bfloat16\",\"shape\":[32,48]"
static const bad_text bad_states[] = {
    {"empty object", "{}", "'quant_type' must be a string"},
    {"wrong type", "{\"quant_type\":\"fp4\"}", "quant_type 'fp4' does not match the tensor's name"},
    {"blocksize 0", "{\"quant_type\":\"nf4\",\"blocksize\":0}", "'blocksize' must be an integer from 32 to 4096, found 0"},
    {"blocksize 96", "{\"quant_type\":\"nf4\",\"blocksize\":96}", "blocksize 96 is not a power of two"},
    {"dtype int8", "{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"int8\"}", "dtype 'int8' is not supported"},
    {"other shape", "{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float16\",\"shape\":[48,32]}",
     "shape [48,32], config.json asks for [32, 48]"},
    {"no shape", "{\"quant_type\":\"nf4\",\"blocksize\":64,\"dtype\":\"float16\"}", "shape nothing, config.json asks for"},
    {"nested_blocksize 100", "{" S ",\"nested_blocksize\":100}", "nested_blocksize 100 is not a power of two"},
    {"nested dtype", "{" S ",\"nested_blocksize\":256,\"nested_dtype\":\"float16\"}", "nested_dtype 'float16' is not supported"},
    {"no offset", "{" S ",\"nested_blocksize\":256}", "'nested_offset' must be a number"},
    {"offset NaN", "{" S ",\"nested_blocksize\":256,\"nested_offset\":NaN}", "bad JSON"},
    {"offset too large", "{" S ",\"nested_blocksize\":256,\"nested_offset\":1e39}", "'nested_offset' must be a number"},
    {"plain scales expected", "{" S "}", "has 24 elements of uint8, expected 24 of float32"},
};
#undef S
#undef D
#undef P
