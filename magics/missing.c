/* Answers for what the core cannot report yet; linked last, so that the core's own functions win. A report that
 * exists makes its function here unused: delete it then. */
#include "core/qlora.h"

__attribute__((weak)) ql_status ql_model_report(const ql_job *job, json_t **out)
{
    json_t *r = json_pack("{s:s}", "model", ql_job_str(job, "model"));
    if (!r) QL_FAIL(QL_EINVAL, "a model's name must be UTF-8");
    *out = r;
    return QL_OK;
}

__attribute__((weak)) ql_status ql_data_report(const ql_job *job, int n_samples, json_t **out)
{
    (void)n_samples;
    json_t *r = json_pack("{s:s, s:[s]}", "data", ql_job_str(job, "data"), "warnings",
                          "this build does not look into the data before training");
    if (!r) QL_FAIL(QL_EINVAL, "the data's name must be UTF-8");
    *out = r;
    return QL_OK;
}

__attribute__((weak)) ql_status ql_plan_report(const ql_job *job, const json_t *devices, json_t **out)
{
    (void)job, (void)devices, (void)out;
    QL_FAIL(QL_ENOSUP, "this build makes no plans yet");
}
