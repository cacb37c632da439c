/* The table of settings. One row each: parsing, checks, help and completion come from it. Names, defaults and
 * ranges are those of TrainingArguments, SFTConfig, LoraConfig and BitsAndBytesConfig; `theirs` marks the few
 * defaults that differ. A setting we know but do not honour is here too, so that it is refused or noted by
 * name instead of being swallowed. */
#include "core/qlora.h"

#include <math.h>
#include <string.h>

#define BOOL_(n, g, d, h)      .name = n, .group = g, .type = QL_SET_BOOL, .def = d, .help = h
#define INT_(n, g, d, a, b, h) .name = n, .group = g, .type = QL_SET_INT, .def = d, .min = a, .max = b, .help = h
#define NUM_(n, g, d, a, b, h) .name = n, .group = g, .type = QL_SET_FLOAT, .def = d, .min = a, .max = b, .help = h
#define STR_(n, g, d, h)       .name = n, .group = g, .type = QL_SET_STR, .def = d, .help = h
#define ONE_(n, g, d, c, h)    .name = n, .group = g, .type = QL_SET_CHOICE, .def = d, .choices = c, .help = h
#define ANY_(n, g, d, h)       .name = n, .group = g, .type = QL_SET_JSON, .def = d, .help = h

#define DTYPES "auto|float16|bfloat16|float32"
#define INF    HUGE_VAL

/* Notes and reasons that several settings share. */
#define NO_EFFECT   "accepted, has no effect here"
#define ALWAYS      "accepted: always so here"
#define NO_REPORT   "accepted, nothing is sent anywhere: the run's folder holds events.jsonl and trainer_state.json"
#define NO_HUB      "accepted, nothing is pushed while training: %qlora save --push_to_hub NAME does it"
#define NO_LOADER   "accepted, has no effect: batches are made by the engine itself"
#define NO_TORCH    "accepted, has no effect: there is no torch in the engine; kernels are compiled ahead"
#define NO_DDP      "accepted, has no effect: ranks are the engine's own (--devices, --fsdp)"
#define ONLY_CAUSAL "only the causal language model's own loss is computed"
#define LORA_ONLY   "only plain LoRA and rsLoRA adapters are trained"
#define NO_METRICS  "accepted, has no effect: evaluation computes eval_loss and no other metrics"

static const ql_setting table[] = {
    /* ---- model: BitsAndBytesConfig and from_pretrained ---- */
    {STR_("model", "model", "null", "a folder, a hub name, or a bundled name (tiny)"),
     .alias = "model_name_or_path|pretrained_model_name_or_path|model_id"},
    {STR_("revision", "model", "null", "the hub's revision of the model")},
    {ONE_("dtype", "model", "\"auto\"", DTYPES, "compute dtype; auto: bfloat16 where the device has it, else float16"),
     .theirs = "\"float32\"", .alias = "torch_dtype|compute_dtype"},
    {BOOL_("load_in_4bit", "model", "true", "quantise 16-bit weights to NF4 on load; a 4-bit file stays as it is"), .theirs = "false"},
    {BOOL_("load_in_8bit", "model", "false", "LLM.int8"), .refused = "LLM.int8 is not supported: load a 16-bit or a 4-bit (NF4) model"},
    {ONE_("bnb_4bit_quant_type", "model", "\"nf4\"", "nf4|fp4", "the 4-bit code used when quantising on load"), .theirs = "\"fp4\""},
    {BOOL_("bnb_4bit_use_double_quant", "model", "true", "quantise the scales as well (0.37 bits per weight less)"), .theirs = "false"},
    {ONE_("bnb_4bit_compute_dtype", "model", "\"auto\"", DTYPES, "the same as dtype, by bitsandbytes' name"), .theirs = "\"float32\""},
    {ONE_("bnb_4bit_quant_storage", "model", "\"uint8\"", "uint8|float16|bfloat16|float32", "how 4-bit bytes are labelled"),
     .note = "accepted, has no effect: packed bytes are bytes here, whatever the label"},
    {ANY_("llm_int8_skip_modules", "model", "null", "linears that stay 16-bit when quantising on load, by name or part of their path (the head always does)")},
    {NUM_("llm_int8_threshold", "model", "6.0", 0, INF, "LLM.int8's outlier threshold"), .note = NO_EFFECT ": only LLM.int8 uses it"},
    {BOOL_("llm_int8_enable_fp32_cpu_offload", "model", "false", "LLM.int8's offload"), .note = NO_EFFECT ": see store and fsdp"},
    {BOOL_("llm_int8_has_fp16_weight", "model", "false", "LLM.int8's 16-bit weights"), .note = NO_EFFECT ": only LLM.int8 uses it"},
    {ONE_("dequant_via", "model", "\"state_dtype\"", "state_dtype|direct",
          "round 4-bit weights to their stored dtype first (bitsandbytes up to 0.49), or straight to dtype")},
    {ONE_("residual_dtype", "model", "\"auto\"", DTYPES, "the residual stream; auto: dtype, but float32 for Qwen in float16")},
    {BOOL_("trust_remote_code", "model", "false", "run a model's own Python"), .refused = "models are not code here: no Python of a model is run"},
    {ANY_("model_init_kwargs", "model", "null", "from_pretrained's arguments"), .refused = "give them as settings of their own (dtype, revision …)"},
    {ONE_("attn_implementation", "model", "null", "eager|sdpa|flash_attention_2|flash_attention_3|flex_attention", "transformers' attention"),
     .note = "accepted: there is one attention here, fused and ragged, on every device"},
    {ANY_("device_map", "model", "null", "accelerate's placement"), .note = "accepted, has no effect: see devices, store and fsdp"},
    {NUM_("router_aux_loss_coef", "model", "null", 0, INF, "mixture-of-experts models"), .refused = "mixture-of-experts models are not supported"},

    /* ---- lora: LoraConfig ---- */
    {STR_("adapter", "lora", "null", "a PEFT adapter to start from (a run, a checkpoint, a folder, a hub name): its r, alpha and modules hold; null: fresh"),
     .alias = "init_adapter|adapter_name_or_path|adapter_path|lora_model_dir"},
    {INT_("r", "lora", "16", 1, 1024, "rank of the adapters"), .theirs = "8", .alias = "lora_r|lora_rank"},
    {NUM_("lora_alpha", "lora", "16", 1e-6, 1e6, "scale: alpha/r, with use_rslora alpha/sqrt(r)"), .theirs = "8", .alias = "alpha"},
    {NUM_("lora_dropout", "lora", "0.0", 0, 0.999, "dropout in front of A, on the adapter's branch only")},
    {ANY_("target_modules", "lora", "\"all-linear\"", "names (q_proj,v_proj), one regex of the whole path, or all-linear"),
     .theirs = "null", .alias = "lora_target_modules"},
    {ANY_("exclude_modules", "lora", "null", "names or one regex; wins over target_modules")},
    {BOOL_("use_rslora", "lora", "false", "scale by alpha/sqrt(r)")},
    {ANY_("rank_pattern", "lora", "{}", "regex of a path → its r")},
    {ANY_("alpha_pattern", "lora", "{}", "regex of a path → its lora_alpha")},
    {ANY_("layers_to_transform", "lora", "null", "layer numbers that get adapters")},
    {ANY_("layers_pattern", "lora", "null", "name of the list of layers, for layers_to_transform")},
    {ANY_("init_lora_weights", "lora", "true", "true: A kaiming uniform, B zero; \"gaussian\"; false: both random")},
    {ONE_("bias", "lora", "\"none\"", "none|all|lora_only", "which biases are trained")},
    {BOOL_("use_dora", "lora", "false", "DoRA"), .refused = "DoRA is not supported: " LORA_ONLY},
    {ANY_("modules_to_save", "lora", "null", "modules trained in full"), .refused = "no module is trained in full: " LORA_ONLY},
    {BOOL_("lora_bias", "lora", "false", "a bias in B"), .refused = LORA_ONLY ", without bias"},
    {BOOL_("fan_in_fan_out", "lora", "false", "transposed weights (GPT-2)"), .refused = "no supported model stores its weights transposed"},
    {ANY_("trainable_token_indices", "lora", "null", "tokens trained"), .refused = "embeddings are not trained: " LORA_ONLY},
    {ANY_("layer_replication", "lora", "null", "repeated layers"), .refused = "layers cannot be repeated: " LORA_ONLY},
    {ANY_("loftq_config", "lora", "{}", "LoftQ"), .refused = "LoftQ changes the base model: " LORA_ONLY},
    {ANY_("eva_config", "lora", "null", "EVA"), .refused = "EVA is not supported: " LORA_ONLY},
    {ANY_("corda_config", "lora", "null", "CorDA"), .refused = "CorDA is not supported: " LORA_ONLY},
    {ANY_("lora_ga_config", "lora", "null", "LoRA-GA"), .refused = "LoRA-GA is not supported: " LORA_ONLY},
    {ANY_("velora_config", "lora", "null", "VeLoRA"), .refused = "VeLoRA is not supported: " LORA_ONLY},
    {ANY_("monteclora_config", "lora", "null", "MonteCLoRA"), .refused = "MonteCLoRA is not supported: " LORA_ONLY},
    {ANY_("kasa_config", "lora", "null", "KaSA"), .refused = "KaSA is not supported: " LORA_ONLY},
    {ANY_("arrow_config", "lora", "null", "Arrow"), .refused = "Arrow is not supported: " LORA_ONLY},
    {ANY_("use_bdlora", "lora", "null", "BD-LoRA"), .refused = "BD-LoRA is not supported: " LORA_ONLY},
    {BOOL_("use_qalora", "lora", "false", "QALoRA"), .refused = "QALoRA is not supported: " LORA_ONLY},
    {INT_("qalora_group_size", "lora", "16", 1, 65536, "QALoRA's groups"), .note = NO_EFFECT ": only QALoRA uses it"},
    {ANY_("alora_invocation_tokens", "lora", "null", "activated LoRA"), .refused = "activated LoRA is not supported: " LORA_ONLY},
    {ANY_("target_parameters", "lora", "null", "raw parameters"), .refused = "adapters sit on linears: name them in target_modules"},
    {ANY_("megatron_config", "lora", "null", "Megatron"), .refused = "Megatron is not supported"},
    {STR_("megatron_core", "lora", "\"megatron.core\"", "Megatron"), .note = NO_EFFECT},
    {ANY_("runtime_config", "lora", "null", "PEFT's run time"), .note = NO_EFFECT},
    {BOOL_("ensure_weight_tying", "lora", "false", "ties adapters of tied weights"), .note = NO_EFFECT ": embeddings and head have no adapters"},
    {STR_("task_type", "lora", "\"CAUSAL_LM\"", "PEFT's task"), .note = "accepted: always CAUSAL_LM"},
    {STR_("peft_type", "lora", "\"LORA\"", "PEFT's method"), .note = "accepted: always LORA"},
    {BOOL_("inference_mode", "lora", "false", "PEFT's flag"), .note = NO_EFFECT},
    {STR_("base_model_name_or_path", "lora", "null", "PEFT's record of the base"), .note = "accepted, has no effect: the model's name is written"},
    {ANY_("auto_mapping", "lora", "null", "PEFT's record of a class"), .note = NO_EFFECT},
    {STR_("peft_version", "lora", "null", "PEFT's record of itself"), .note = NO_EFFECT},
    {BOOL_("autocast_adapter_dtype", "lora", "true", "adapters in float32"), .note = ALWAYS ": adapters are float32 masters"},
    {ONE_("save_dtype", "lora", "\"float32\"", "float32|float16|bfloat16", "dtype of adapter_model.safetensors in the run's folder")},

    /* ---- data: SFTConfig ---- */
    {STR_("data", "data", "null", "a JSON, JSONL or text file, a folder, a hub name, or a bundled name"),
     .alias = "dataset|dataset_name|train_dataset|train_file"},
    {STR_("eval_dataset", "data", "null", "what evaluation runs on"), .alias = "eval_data|eval_file|validation_file"},
    {ANY_("data_files", "data", "null", "files inside data, a name or a list")},
    {STR_("split", "data", "\"train\"", "which split, also train[:10%]"), .alias = "dataset_split"},
    {STR_("dataset_text_field", "data", "\"text\"", "the column that holds text")},
    {INT_("max_length", "data", "1024", 2, 1 << 24, "longer samples are cut, their start is kept"), .alias = "max_seq_length|block_size"},
    {ONE_("truncation_mode", "data", "\"keep_start\"", "keep_start", "which end of a long sample is kept")},
    {BOOL_("packing", "data", "false", "several samples in one row; they never see each other")},
    {ONE_("packing_strategy", "data", "\"bfd\"", "bfd|bfd_split|wrapped", "best fit; long ones split; or cut as one stream")},
    {BOOL_("eval_packing", "data", "null", "packing of the evaluation set; null: as packing")},
    {BOOL_("padding_free", "data", "false", "rows without padding"), .note = ALWAYS ": padded positions are not computed with"},
    {ANY_("pad_to_multiple_of", "data", "null", "row lengths"), .note = "accepted, has no effect: lengths round up to 64 tokens"},
    {BOOL_("completion_only_loss", "data", "null", "train on completions only; null: if there are prompts and completions")},
    {BOOL_("assistant_only_loss", "data", "false", "train on the assistant's turns only")},
    {BOOL_("train_on_responses", "data", "false", "train on what follows each prompt of the template"), .alias = "train_on_responses_only"},
    {STR_("chat_template", "data", "null", "a template, or a file of one; null: the tokenizer's"), .alias = "chat_template_path"},
    {STR_("eos_token", "data", "null", "the token that ends a sample")},
    {STR_("pad_token", "data", "null", "the token that fills rows"),
     .note = "accepted, has no effect: padded positions are not computed with, and no label is masked for its token"},
    {BOOL_("shuffle_dataset", "data", "false", "shuffle once before packing"),
     .refused = "every epoch is shuffled by the seed already"},
    {INT_("dataset_num_proc", "data", "null", 1, 1024, "processes that tokenise"), .note = NO_LOADER},
    {ANY_("dataset_kwargs", "data", "null", "TRL's options"), .refused = "give them as settings of their own"},
    {ANY_("formatting_func", "data", "null", "a Python function"), .refused = "format the samples before, into text, messages, or prompt and completion"},
    {STR_("order_file", "data", "null", "sample numbers, one a line: train in exactly this order")},
    {BOOL_("remove_unused_columns", "data", "true", "ignore other columns"), .note = ALWAYS},
    {ANY_("label_names", "data", "null", "columns that are labels"), .note = NO_EFFECT ": labels, or the tokens themselves"},
    {BOOL_("dataloader_drop_last", "data", "false", "leave out the last batch of an epoch if it is short")},
    {INT_("dataloader_num_workers", "data", "0", 0, 1024, "loader processes"), .note = NO_LOADER},
    {BOOL_("dataloader_pin_memory", "data", "true", "pinned batches"), .note = NO_LOADER},
    {BOOL_("dataloader_persistent_workers", "data", "false", "loader processes"), .note = NO_LOADER},
    {INT_("dataloader_prefetch_factor", "data", "null", 0, 1024, "loader queue"), .note = NO_LOADER},
    {STR_("dataloader_multiprocessing_context", "data", "null", "loader processes"), .note = NO_LOADER},
    {BOOL_("dataloader_in_order", "data", "true", "loader order"), .note = ALWAYS},
    {BOOL_("group_by_length", "data", "false", "batches of like length"),
     .refused = "the order is the seed's alone (it must not depend on devices); packing avoids padding"},
    {ONE_("train_sampling_strategy", "data", "\"random\"", "random|sequential|group_by_length", "the order of an epoch")},
    {STR_("length_column_name", "data", "\"length\"", "for group_by_length"), .note = NO_EFFECT},

    /* ---- train ---- */
    {INT_("per_device_train_batch_size", "train", "2", 1, 65536, "samples of a micro-batch, per device"), .theirs = "8",
     .alias = "batch_size|train_batch_size|per_gpu_train_batch_size|micro_batch_size"},
    {INT_("gradient_accumulation_steps", "train", "1", 1, 1 << 20, "micro-batches per step, per device"), .alias = "grad_accum"},
    {NUM_("learning_rate", "train", "2e-4", 0, 1e3, "the schedule's top"), .theirs = "5e-5", .alias = "lr"},
    {NUM_("num_train_epochs", "train", "3.0", 1e-9, 1e6, "passes over the data"), .alias = "epochs|num_epochs"},
    {INT_("max_steps", "train", "-1", -1, 1e12, "optimizer steps; above 0 it wins over num_train_epochs")},
    {ONE_("lr_scheduler_type", "train", "\"linear\"",
          "linear|cosine|cosine_with_restarts|polynomial|constant|constant_with_warmup|inverse_sqrt|cosine_with_min_lr|"
          "cosine_warmup_with_min_lr|warmup_stable_decay",
          "how the learning rate moves"), .alias = "lr_scheduler|scheduler"},
    {ANY_("lr_scheduler_kwargs", "train", "null", "its options: num_cycles, min_lr, min_lr_rate, lr_end, power, num_decay_steps …")},
    {NUM_("warmup_steps", "train", "0", 0, 1e12, "steps of warm-up; below 1 a part of all steps")},
    {NUM_("warmup_ratio", "train", "0.0", 0, 1, "the same as a part of all steps; warmup_steps wins")},
    {ONE_("optim", "train", "\"adamw_torch\"",
          "adamw_torch|adamw_torch_fused|adamw_8bit|adamw_bnb_8bit|paged_adamw|paged_adamw_32bit|paged_adamw_8bit",
          "the optimizer; paged: its state rests in host memory"), .alias = "optimizer"},
    {ANY_("optim_args", "train", "null", "the optimizer's other options"), .refused = "no optimizer here takes any"},
    {ANY_("optim_target_modules", "train", "null", "GaLore and its kin"), .refused = "GaLore and its kin are not supported"},
    {NUM_("weight_decay", "train", "0.0", 0, 1e3, "AdamW's; every A and B decays")},
    {NUM_("adam_beta1", "train", "0.9", 0, 0.9999999, "AdamW")},
    {NUM_("adam_beta2", "train", "0.999", 0, 0.9999999, "AdamW")},
    {NUM_("adam_epsilon", "train", "1e-8", 0, 1, "AdamW")},
    {NUM_("max_grad_norm", "train", "1.0", -INF, INF, "clip the gradient's norm; 0 or less: no clipping")},
    {NUM_("label_smoothing_factor", "train", "0.0", 0, 0.999999, "label smoothing")},
    {ONE_("loss_denominator", "train", "\"shifted\"", "shifted|hf_unshifted", "what the loss is divided by: predicted tokens, or older transformers' count")},
    {ONE_("loss_type", "train", "\"chunked_nll\"", "nll|chunked_nll|dft", "TRL's loss")},
    {INT_("seed", "train", "42", 0, 4294967295.0, "of adapters, dropout and data order"), .alias = "random_state"},
    {INT_("data_seed", "train", "null", 0, 4294967295.0, "of the data order; null: seed")},
    {BOOL_("fp16", "train", "false", "the same as dtype float16")},
    {BOOL_("bf16", "train", "false", "the same as dtype bfloat16")},
    {BOOL_("tf32", "train", "null", "TF32 matmul"), .note = "accepted, has no effect: float32 is computed as float32"},
    {STR_("fp16_opt_level", "train", "\"O1\"", "apex"), .note = NO_EFFECT},
    {STR_("half_precision_backend", "train", "\"auto\"", "torch or apex"), .note = NO_TORCH, .alias = "fp16_backend"},
    {BOOL_("average_tokens_across_devices", "train", "true", "the loss is a mean over all devices' tokens"),
     .note = "accepted: always true here, the loss is the mean over the tokens of all devices"},
    {NUM_("neftune_noise_alpha", "train", "null", 0, INF, "NEFTune"), .refused = "NEFTune is not supported"},
    {BOOL_("include_num_input_tokens_seen", "train", "false", "count input tokens in the records")},
    {BOOL_("use_liger_kernel", "train", "false", "Liger's kernels"), .note = ALWAYS ": norms, loss and activations are fused"},
    {ANY_("liger_kernel_config", "train", "null", "Liger's kernels"), .note = ALWAYS ": norms, loss and activations are fused"},
    {BOOL_("use_cache", "train", "false", "KV cache while training"), .note = NO_EFFECT ": only generation has a KV cache"},
    {BOOL_("auto_find_batch_size", "train", "false", "smaller batches when memory runs out"),
     .refused = "the plan says beforehand what fits; set per_device_train_batch_size"},
    {BOOL_("full_determinism", "train", "false", "same bits every time"), .note = ALWAYS},
    {BOOL_("torch_compile", "train", "false", "torch.compile"), .note = NO_TORCH},
    {STR_("torch_compile_backend", "train", "null", "torch.compile"), .note = NO_TORCH},
    {STR_("torch_compile_mode", "train", "null", "torch.compile"), .note = NO_TORCH},
    {STR_("torchdynamo", "train", "null", "torch.compile"), .note = NO_TORCH},
    {INT_("torch_empty_cache_steps", "train", "null", 1, 1e12, "torch's allocator"), .note = NO_TORCH},
    {BOOL_("jit_mode_eval", "train", "false", "torch.jit"), .note = NO_TORCH},
    {BOOL_("use_ipex", "train", "false", "Intel's extension"), .note = NO_TORCH},
    {STR_("ray_scope", "train", "\"last\"", "hyper-parameter search"), .note = NO_EFFECT},
    {STR_("mp_parameters", "train", "\"\"", "SageMaker"), .note = NO_EFFECT},
    {STR_("debug", "train", "\"\"", "torch's debugging"), .note = NO_TORCH},
    {BOOL_("skip_memory_metrics", "train", "true", "memory in the metrics"), .note = NO_EFFECT ": memory is in the memory events"},
    {INT_("past_index", "train", "-1", -1, 1024, "recurrent models"), .note = NO_EFFECT},
    {BOOL_("do_train", "train", "false", "for scripts"), .note = NO_EFFECT},
    {BOOL_("do_eval", "train", "false", "for scripts"), .note = NO_EFFECT},
    {BOOL_("do_predict", "train", "false", "for scripts"), .note = NO_EFFECT},
    {STR_("report_to", "train", "\"none\"", "trackers"), .note = NO_REPORT},
    {STR_("project", "train", "\"huggingface\"", "trackers"), .note = NO_REPORT},
    {STR_("trackio_space_id", "train", "null", "trackers"), .note = NO_REPORT},
    {STR_("trackio_bucket_id", "train", "null", "trackers"), .note = NO_REPORT},
    {STR_("trackio_static_space_id", "train", "null", "trackers"), .note = NO_REPORT},
    {ONE_("logging_strategy", "train", "\"steps\"", "no|steps|epoch", "when records are written")},
    {NUM_("logging_steps", "train", "1", 0, 1e12, "every so many steps; below 1 a part of all steps"), .theirs = "500"},
    {BOOL_("logging_first_step", "train", "false", "also after step 1")},
    {BOOL_("logging_nan_inf_filter", "train", "true", "leave NaN and infinite losses out of the records' mean")},
    {STR_("logging_dir", "train", "null", "TensorBoard"), .note = NO_REPORT},
    {STR_("log_level", "train", "\"passive\"", "transformers' log"), .note = NO_EFFECT},
    {STR_("log_level_replica", "train", "\"warning\"", "transformers' log"), .note = NO_EFFECT},
    {BOOL_("log_on_each_node", "train", "true", "transformers' log"), .note = NO_EFFECT},
    {BOOL_("disable_tqdm", "train", "null", "progress bars"), .note = NO_EFFECT},

    /* ---- eval ---- */
    {ONE_("eval_strategy", "eval", "\"no\"", "no|steps|epoch", "when evaluation runs"), .alias = "evaluation_strategy"},
    {NUM_("eval_steps", "eval", "null", 0, 1e12, "every so many steps; below 1 a part of all; null: logging_steps")},
    {NUM_("eval_delay", "eval", "0", 0, 1e12, "steps or epochs before the first evaluation")},
    {BOOL_("eval_on_start", "eval", "false", "also before the first step")},
    {INT_("per_device_eval_batch_size", "eval", "8", 1, 65536, "samples of an evaluation batch, per device"),
     .alias = "eval_batch_size|per_gpu_eval_batch_size"},
    {INT_("eval_accumulation_steps", "eval", "null", 1, 1e12, "moves logits to the host"), .note = NO_EFFECT ": logits are never kept"},
    {BOOL_("fp16_full_eval", "eval", "false", "float16 weights in evaluation"), .note = NO_EFFECT ": evaluation computes as training does"},
    {BOOL_("bf16_full_eval", "eval", "false", "bfloat16 weights in evaluation"), .note = NO_EFFECT ": evaluation computes as training does"},
    {BOOL_("prediction_loss_only", "eval", "false", "no logits"), .note = ALWAYS},
    {BOOL_("eval_do_concat_batches", "eval", "true", "for metrics"), .note = NO_METRICS},
    {BOOL_("eval_use_gather_object", "eval", "false", "for metrics"), .note = NO_METRICS},
    {BOOL_("batch_eval_metrics", "eval", "false", "for metrics"), .note = NO_METRICS},
    {ANY_("include_for_metrics", "eval", "[]", "for metrics"), .note = NO_METRICS},
    {BOOL_("include_inputs_for_metrics", "eval", "false", "for metrics"), .note = NO_METRICS},
    {BOOL_("include_tokens_per_second", "eval", "null", "speed"), .note = ALWAYS},

    /* ---- save ---- */
    {STR_("output_dir", "save", "null", "the run's folder; null: runs/RUN_NAME")},
    {STR_("run_name", "save", "null", "names the run and its folder; null: run-1, run-2 …")},
    {BOOL_("overwrite_output_dir", "save", "false", "reuse a folder"), .note = NO_EFFECT ": a run never overwrites another"},
    {ONE_("save_strategy", "save", "\"steps\"", "no|steps|epoch|best", "when checkpoints are written")},
    {NUM_("save_steps", "save", "500", 0, 1e12, "every so many steps; below 1 a part of all steps")},
    {NUM_("save_minutes", "save", "0", 0, 1e6, "also a checkpoint every so many minutes, for sessions that end by the clock; 0: none")},
    {INT_("save_total_limit", "save", "null", 0, 1e6, "how many checkpoints are kept")},
    {BOOL_("save_safetensors", "save", "true", "safetensors files"), .note = ALWAYS},
    {BOOL_("save_only_model", "save", "false", "checkpoints without optimizer state (they cannot be resumed)")},
    {BOOL_("save_on_each_node", "save", "false", "several machines"), .note = NO_EFFECT},
    {BOOL_("enable_jit_checkpoint", "save", "false", "a checkpoint on SIGTERM"), .note = ALWAYS ": a stop writes one"},
    {BOOL_("load_best_model_at_end", "save", "false", "end with the checkpoint of the best evaluation")},
    {STR_("metric_for_best_model", "save", "null", "what is best: eval_loss")},
    {BOOL_("greater_is_better", "save", "null", "whether more is better; null: no for a loss")},
    {ANY_("resume_from_checkpoint", "save", "null", "a checkpoint's path, or true for the latest")},
    {BOOL_("ignore_data_skip", "save", "false", "after a resume begin the epoch's data anew"),
     .refused = "a resume goes on in the data where the run stopped"},
    {BOOL_("restore_callback_states_from_checkpoint", "save", "false", "callbacks"), .note = NO_EFFECT ": what callbacks keep is not in a checkpoint"},
    {BOOL_("push_to_hub", "save", "false", "upload"), .note = NO_HUB},
    {STR_("hub_model_id", "save", "null", "upload"), .note = NO_HUB},
    {STR_("hub_strategy", "save", "\"every_save\"", "upload"), .note = NO_HUB},
    {STR_("hub_token", "save", "null", "the hub's token"), .refused = "tokens are not kept in a job: set HF_TOKEN", .alias = "token|push_to_hub_token"},
    {BOOL_("hub_private_repo", "save", "null", "upload"), .note = NO_HUB},
    {BOOL_("hub_always_push", "save", "false", "upload"), .note = NO_HUB},
    {STR_("hub_revision", "save", "null", "upload"), .note = NO_HUB},
    {STR_("push_to_hub_model_id", "save", "null", "upload"), .note = NO_HUB},
    {STR_("push_to_hub_organization", "save", "null", "upload"), .note = NO_HUB},

    /* ---- memory: how much, and where things rest ---- */
    {ONE_("gradient_checkpointing", "memory", "\"auto\"", "auto|true|false", "recompute layers in backward; auto: as few as memory asks"),
     .theirs = "false", .alias = "activation_checkpointing"},
    {ANY_("gradient_checkpointing_kwargs", "memory", "null", "torch's checkpointing"), .note = NO_TORCH, .alias = "activation_checkpointing_kwargs"},
    {ONE_("activation_offloading", "memory", "\"auto\"", "auto|true|false", "layers' inputs wait in host memory"), .theirs = "false"},
    {ANY_("fsdp", "memory", "\"auto\"", "auto, true (shard the base), false, or full_shard offload auto_wrap"), .theirs = "null"},
    {ANY_("fsdp_config", "memory", "null", "reshard_after_forward, cpu_offload, activation_checkpointing, forward_prefetch …")},
    {ANY_("store", "memory", "\"auto\"", "auto, resident, resident16, sharded, host; or by layer: 0-15:resident,16-31:host"), .alias = "stores"},
    {ONE_("pipeline", "memory", "\"off\"", "auto|off|1f1b|recompute_ahead",
          "a pipeline: each device has layers of its own; recompute_ahead fills its waits; auto: where it is quicker"),
     .alias = "schedule|pipeline_schedule"},
    {ONE_("breadth", "memory", "\"auto\"", "auto|true|false", "one layer for all micro-batches, then the next: fewer gathers")},
    {BOOL_("forward_prefetch", "memory", "true", "fetch the next layer while one computes, in forward"), .theirs = "false",
     .note = "accepted: always on here, it costs no memory"},
    {BOOL_("backward_prefetch", "memory", "true", "the same in backward"),
     .note = "accepted: always on here, it costs no memory"},
    {ONE_("param_dtype", "memory", "\"auto\"", DTYPES, "the same as dtype, by FSDP2's name")},
    {ONE_("output_dtype", "memory", "\"auto\"", DTYPES, "the same as residual_dtype, by FSDP2's name")},
    {ONE_("reduce_dtype", "memory", "\"float32\"", "float32|float16|bfloat16", "dtype in which gradients are added up")},
    {ANY_("device_memory", "memory", "null", "bytes a device has: 15GiB; a list for unlike devices; null: what it says")},
    {ANY_("host_memory", "memory", "null", "bytes the host has: 30GiB; null: what it says")},

    /* ---- devices ---- */
    {STR_("devices", "devices", "\"auto\"", "auto, 0,1 (GPUs), cuda:0,1, cpu, or cpu:N"), .alias = "device|gpus"},
    {BOOL_("use_cpu", "devices", "false", "the same as devices cpu"), .alias = "no_cuda"},
    {INT_("exact_worlds", "devices", "8", 1, 1024, "world sizes up to this that give the same bits; a power of two")},
    {INT_("deadline_ms", "devices", "0", 0, 86400000, "no progress for so long ends the run; 0: 30 s, or 20 times the plan")},
    {ANY_("deepspeed", "devices", "null", "DeepSpeed"), .refused = "DeepSpeed is not supported: fsdp shards the base over the devices"},
    {ANY_("accelerator_config", "devices", "null", "accelerate"), .note = NO_DDP},
    {ANY_("parallelism_config", "devices", "null", "accelerate"), .refused = "tensor and context parallelism are not supported: see fsdp and pipeline"},
    {BOOL_("split_batches", "devices", "null", "accelerate"), .note = NO_DDP},
    {BOOL_("dispatch_batches", "devices", "null", "accelerate"), .note = NO_DDP},
    {STR_("ddp_backend", "devices", "null", "torch.distributed"), .note = NO_DDP},
    {INT_("ddp_timeout", "devices", "1800", 1, 1e9, "torch.distributed"), .note = "accepted, has no effect: see deadline_ms"},
    {INT_("ddp_bucket_cap_mb", "devices", "null", 1, 1e9, "torch.distributed"), .note = NO_DDP},
    {BOOL_("ddp_find_unused_parameters", "devices", "null", "torch.distributed"), .note = NO_DDP},
    {BOOL_("ddp_broadcast_buffers", "devices", "null", "torch.distributed"), .note = NO_DDP},
    {BOOL_("ddp_static_graph", "devices", "null", "torch.distributed"), .note = NO_DDP},
    {INT_("local_rank", "devices", "-1", -1, 1 << 20, "torch.distributed"), .note = NO_DDP},
    {INT_("fsdp_min_num_params", "devices", "0", 0, 1e15, "torch's wrapping"), .note = "accepted, has no effect: the unit is a decoder layer"},
    {STR_("fsdp_transformer_layer_cls_to_wrap", "devices", "null", "torch's wrapping"), .note = "accepted, has no effect: the unit is a decoder layer"},
    {INT_("tpu_num_cores", "devices", "null", 1, 1 << 20, "TPUs"), .refused = "TPUs are not supported"},
    {BOOL_("tpu_metrics_debug", "devices", "false", "TPUs"), .refused = "TPUs are not supported"},
    {BOOL_("use_mps_device", "devices", "false", "Apple GPUs"), .refused = "Apple GPUs are not supported"},
};

int ql_settings(const ql_setting **out)
{
    *out = table;
    return (int)(sizeof table / sizeof *table);
}

/* One of "a|b|c" is exactly name. */
static bool listed(const char *list, const char *name)
{
    size_t n = strlen(name);
    for (const char *p = list; p && n; p = strchr(p, '|')) {
        if (*p == '|') p++;
        if (strncmp(p, name, n) == 0 && (p[n] == '|' || p[n] == 0)) return true;
    }
    return false;
}

const ql_setting *ql_setting_find(const char *name)
{
    int n = (int)(sizeof table / sizeof *table);
    if (!name) return NULL;
    for (int i = 0; i < n; i++)
        if (strcmp(table[i].name, name) == 0) return &table[i];
    for (int i = 0; i < n; i++)
        if (listed(table[i].alias, name)) return &table[i];
    return NULL;
}
