/* What a notebook has set so far, and what the verbs share. */
#ifndef QL_SESSION_H
#define QL_SESSION_H

#include "magics/client.h"
#include "magics/live.h"
#include "magics/verbs.h"

struct ql_magics {
    ql_host host;
    char *engine, *runs, *bundled, *hub;
    ql_follow follow;
    int lines_every;
    ql_client *client;
    ql_job *job;
    json_t *model;   /* ql_model_report of the job's model, NULL before load */
    json_t *devices; /* of `qlora-engine --devices`, NULL until asked */
    json_t *last;    /* the last run's result, NULL: none */
    char *last_path; /* its folder */
    int displays;    /* numbers display ids */
};

/* A verb's result: {"kind", "repr", "data", "bundle"}. bundle NULL: all was shown already. Takes
 * data and bundle. */
ql_status ql_result(const char *kind, const char *repr, json_t *data, json_t *bundle, json_t **out);

ql_status ql_session_devices(ql_magics *m, json_t **borrowed);
/* How many devices the job will use, as far as that is known without asking: 0 otherwise. */
int64_t ql_session_world(const ql_magics *m, const ql_job *job);
ql_status ql_session_need_model(const ql_magics *m);
/* A run's name, folder, checkpoint or trainer_state.json → its path; NULL: the last run. Frees with
 * free(). */
ql_status ql_session_run_path(ql_magics *m, const char *name, char **path);
/* ql_run_report with its "name" and "path". */
ql_status ql_session_run_report(ql_magics *m, const char *name, json_t **out);
/* "runs/run-1/checkpoint-40" → the run's folder, in place; a run's folder stays. */
void ql_session_cut_checkpoint(char *path);
/* The job that a run, or that of a checkpoint, was started with; the notebook's own where none is stored. */
ql_status ql_session_run_job(ql_magics *m, const char *path, ql_job **job);
/* The notebook's job; that of the named run where the notebook has no model yet. */
ql_status ql_session_text_job(ql_magics *m, const char *run, ql_job **job);
/* The adapter of a run as the engine takes it: its folder, or its last checkpoint's where it did not finish; null for `none` (the base model). Without a run: the last one's, else the one
 * that the job starts from, else null. */
ql_status ql_session_adapter(ql_magics *m, const char *run, const ql_job *job, json_t **adapter);
/* A variable's rows as a file of theirs; bundled names and names on the hub as their folders; else what is there. Frees with free(). */
ql_status ql_session_data(ql_magics *m, const char *name, const ql_job *job, char **path);
/* The call's settings into the job; a name that `adapter` (of a run, or on the hub) or `eval_dataset` (as for data) gives becomes a path.
 * What the call sets without effect is said, by name. */
ql_status ql_session_apply(ql_magics *m, const ql_call *call, ql_job *job);
/* Whether there is evaluation data, and its file is there. */
ql_status ql_session_eval_data(const ql_job *job);
/* A bundled name → its folder, else the text itself. Frees with free(). */
char *ql_session_bundled(const ql_magics *m, const char *name);
/* The same; a name on the hub is fetched first, with a bar where there is something to fetch, and is its folder in the cache. */
/* An error that names what comes nearest. */
ql_status ql_session_no_such(ql_magics *m, ql_fetch_what what, const char *name);
ql_status ql_session_fetch(ql_magics *m, ql_fetch_what what, const char *name, const char *revision, const json_t *files,
                           char **path);
/* The folder that holds a run's adapter: its own, or its last checkpoint where it did not finish. Frees with free(). */
ql_status ql_session_adapter_folder(const char *run, char **folder);
/* Sends cmd with a live view for loading and progress; name: what is written on it. record: NULL, or all that was seen. */
ql_status ql_session_ask(ql_magics *m, json_t *cmd, const char *name, json_t **result, json_t **record);
/* --push_to_hub, where it is given: whether this host can, asked before any work; then the upload, which leaves data["hub"], and the view's line. */
ql_status ql_session_may_push(const ql_magics *m, const ql_call *call);
ql_status ql_session_push(ql_magics *m, const ql_call *call, const char *folder, const char *const *patterns, json_t *data);
void ql_push_note(ql_view *v, const json_t *data);
ql_status ql_session_folders(const char *name); /* mkdir -p */
json_t *ql_read_json_file(const char *path); /* NULL and an error text */

ql_status ql_verb_info(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_bench(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_load(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_config(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_data(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_plan(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_train(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_resume(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_eval(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_generate(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_plot(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_memory(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_baseline(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_verify(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_save(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_merge(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_unload(ql_magics *m, const ql_call *call, json_t **out);
ql_status ql_verb_help(ql_magics *m, const ql_call *call, json_t **out);

#endif
