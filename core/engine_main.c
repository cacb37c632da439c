/* qlora-engine                 serves commands on fd 3 (core/qlora.h has the protocol)
 * qlora-engine --devices       prints what devices there are, as JSON */
#include "core/devices.h"
#include "core/qlora.h"
#include "core/session.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int devices(const char *library)
{
    json_t *list = NULL, *all;
    char missing[512];
    if (ql_devices_probe(library, &list, missing, sizeof missing) != QL_OK) {
        fprintf(stderr, "qlora-engine: %s\n", ql_error());
        return 1;
    }
    all = json_pack("{s:o,s:s,s:I}", "devices", list, "missing", missing, "host_free", (json_int_t)ql_host_free());
    json_dumpf(all, stdout, JSON_INDENT(1));
    putchar('\n');
    json_decref(all);
    return 0;
}

int main(int argc, char **argv)
{
    ql_backend_cpu_start(argv);
    const char *library = getenv("QLORA_CUDA_LIBRARY");
    char dirs[8192] = "";
    const char *nccl = getenv("NCCL_HOME"), *more = getenv("QLORA_LIBRARY_PATH");
    snprintf(dirs, sizeof dirs, "%s%s%s%s", nccl ? nccl : "", nccl ? "/lib" : "", nccl && more ? ":" : "", more ? more : "");
    ql_backend_cuda_search(dirs);
    if (argc == 2 && strcmp(argv[1], "--devices") == 0) return devices(library);
    if (argc > 1) {
        fprintf(stderr, "usage: qlora-engine [--devices]\n");
        return 2;
    }
    ql_session_setup set = {.fd = QL_ENGINE_FD, .cuda_library = library};
    if (ql_session_run(&set) != QL_OK) {
        fprintf(stderr, "qlora-engine: %s\n", ql_error());
        return 1;
    }
    return 0;
}
