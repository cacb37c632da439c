#include "tests/fuzz/rows.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size) fuzz_rows(data + 1, size - 1, data[0] & 1 ? "json" : "jsonl", data[0] & 2 ? "train[:50%]" : NULL);
    return 0;
}
