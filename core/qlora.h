/* The engine as its front ends see it: the only header magics/ includes. Everything a front end needs is
 * here: settings, the description of a job, plans, data reports, run folders; and the protocol of the
 * engine process. JSON values are jansson's; a json_t* returned is owned by the caller unless it says
 * "borrowed". */
#ifndef QL_QLORA_H
#define QL_QLORA_H

#include "kernels/base.h"

#include <jansson.h>

/* ---- settings: one table (settings.c) feeds parsing, checks, help, completion --------------------------- */

typedef enum { QL_SET_BOOL, QL_SET_INT, QL_SET_FLOAT, QL_SET_STR, QL_SET_CHOICE, QL_SET_JSON } ql_set_type;

typedef struct {
    const char *name;    /* transformers', TRL's, PEFT's or bitsandbytes' own name where there is one */
    const char *group;   /* "model", "lora", "data", "train", "eval", "save", "memory", "devices" */
    ql_set_type type;    /* QL_SET_JSON: list, dict, or string (target_modules, fsdp_config, …) */
    const char *def;     /* default, as JSON text: "2e-4", "\"all-linear\"", "null" */
    const char *theirs;  /* NULL, or the upstream default where ours differs: `config` marks it (here) */
    const char *choices; /* QL_SET_CHOICE: "linear|cosine|…" */
    double min, max;     /* numbers: allowed range */
    const char *alias;   /* NULL or other spellings, "max_seq_length|block_size" */
    const char *note;    /* NULL, or what is said when it is set: accepted without effect, always so here … */
    const char *refused; /* NULL, or why setting it is an error */
    const char *help;    /* one line */
} ql_setting;

int ql_settings(const ql_setting **out);             /* the table and its length */
const ql_setting *ql_setting_find(const char *name); /* by name or alias; NULL */
/* The nearest known names, "did you mean 'lora_alpha' or 'lora_dropout'?"; "" if none is near. */
const char *ql_setting_nearest(const char *name, char *buf, size_t size);

/* ---- a job: what the user has set so far ----------------------------------------------------------- */

typedef struct ql_job ql_job;
ql_status ql_job_new(ql_job **out);
ql_status ql_job_copy(const ql_job *job, ql_job **out);
void ql_job_free(ql_job *job);
/* Checks type, choices and range; a null value goes back to the default. Errors name the setting, what was given, what is
 * allowed. */
ql_status ql_job_set(ql_job *job, const char *name, json_t *value);
/* The same from text, read by the setting's type ("2e-4", "true", "q_proj,v_proj", "[\"a\"]", "{…}"). */
ql_status ql_job_set_text(ql_job *job, const char *name, const char *text);
const json_t *ql_job_get(const ql_job *job, const char *name); /* borrowed; the default where unset; NULL: no such name */
int ql_job_is_set(const ql_job *job, const char *name);
int64_t ql_job_int(const ql_job *job, const char *name);
double ql_job_float(const ql_job *job, const char *name);
int ql_job_bool(const ql_job *job, const char *name);
const char *ql_job_str(const ql_job *job, const char *name); /* NULL when null */
/* Conflicts between settings (fp16 and bf16, gradient_checkpointing with fsdp activation_checkpointing, …). */
ql_status ql_job_check(const ql_job *job);
json_t *ql_job_json(const ql_job *job);              /* what is set, as one object: stored with every run */
ql_status ql_job_from_json(const json_t *object, ql_job **out);
/* Notes of the set values ("report_to: accepted, nothing is reported"): an array of strings. */
json_t *ql_job_notes(const ql_job *job);

/* ---- before anything is loaded --------------------------------------------------------------------- */

/* Reads config.json and file headers of job "model" (a folder, a cached or bundled name): architecture, sizes, quantisation, LoRA
 * counts, "trainable" (PEFT's line). {"model","path","arch","layers","hidden",…,"parameters","bytes","quantised","trainable"} */
ql_status ql_model_report(const ql_job *job, json_t **out);
/* What would be trained on: {"rows","tokens","trained_tokens","skipped":{…},"truncated","histogram":[…],"warnings":[…],"samples":[{"text",
 * "spans":[[start,end,trained]…]}]}; n_samples are rendered. */
ql_status ql_data_report(const ql_job *job, int n_samples, json_t **out);
/* devices: array of {"name","id","backend","total","free","arch"} from `qlora-engine --devices`, or made up. {"fits":bool,"chosen":{…},
 * "devices":[{"rank","bytes":{category:n},"total","capacity"}],"host":n,"alternatives":[{"name","per_device":n,"host":n,"fits","seconds",
 * "longest"}],"longest","seconds","why":[…],"exact_worlds":[1,2,4,8]} */
ql_status ql_plan_report(const ql_job *job, const json_t *devices, json_t **out);
/* One optimizer step of such a plan, proven: an array with a text for each rank, one action a line. */
ql_status ql_plan_actions(const ql_job *job, const json_t *devices, json_t **out);

/* ---- the hub ---------------------------------------------------------------------------------------- */

typedef struct {
    const char *cache;    /* huggingface_hub's own folder: $HF_HUB_CACHE, or $HF_HOME/hub */
    const char *endpoint; /* NULL: https://huggingface.co */
    const char *token;    /* NULL: none. Is sent to the endpoint alone and stands in no message */
    int offline;          /* only what is in the cache */
    /* Bytes of all files wanted; nonzero stops (the next fetch goes on from there). At least once a second. */
    int (*progress)(void *user, const char *file, int64_t done, int64_t total);
    void *user;
} ql_hub_access;
typedef enum { QL_FETCH_MODEL, QL_FETCH_DATA, QL_FETCH_ADAPTER } ql_fetch_what;

/* Whether a name could be one on the hub: "organisation/name", or a folder of its cache that may be gone. */
int ql_fetch_named(const char *name);
/* Its files that the engine reads, in the cache; *folder: where, free(). revision NULL: main; a folder of the cache: its own commit.
 * files: a pattern or a list of them, NULL or null: all that the engine reads. What is there is not fetched again. */
ql_status ql_fetch(const ql_hub_access *hub, ql_fetch_what what, const char *name, const char *revision, const json_t *files,
                   char **folder);

/* ---- run folders ----------------------------------------------------------------------------------- */

/* runs/<name>/{job.json, events.jsonl, trainer_state.json, checkpoint-N/, adapter_model.safetensors, adapter_config.json}. The next free
 * "run-N" under dir. */
ql_status ql_run_next_name(const char *dir, char *buf, size_t size);
/* Whether a process trains in this run's folder now: events.jsonl is locked. */
int ql_run_trains(const char *path);
/* The checkpoint that a run goes on from: the latest whole one in its folder, or the one that is named. While no engine trains there.
 * Caller frees. */
ql_status ql_run_checkpoint(const char *path, char **out);
/* log_history, last step, checkpoints of a run folder, a checkpoint or a trainer_state.json. */
ql_status ql_run_report(const char *path, json_t **out);

/* ---- the engine process ---------------------------------------------------------------------------- *
 * qlora-engine reads commands from fd 3 and writes events to fd 3 (a socketpair), one JSON object a line.
 * End of input ends it. One command at a time; "stop" at any time.
 *
 *   {"cmd":"train","id":1,"job":{…},"run":"runs/run-1"}            fresh adapters from the seed, or the job's "adapter"
 *   {"cmd":"train","id":2,"job":{…},"run":"runs/run-1","resume":"runs/run-1/checkpoint-40"}
 *      "steps":N      stop after N steps of the same schedule (baseline)
 *      "train_data":PATH   a tokenised data set (core/dataset.h) in place of the job's data
 *   {"cmd":"eval","id":3,"job":{…},"adapter":PATH|null}
 *   {"cmd":"generate","id":4,"job":{…},"adapter":PATH|null,"prompts":[TEXT|[id…]…],"messages":[[{"role","content"}…]…],
 *      "max_new_tokens":64,"temperature":0,"top_p":1,"top_k":0,"repetition_penalty":1,"seed":0,"compare":true}
 *      adapter null: the base alone. messages: conversations, behind the prompts. compare: also without the adapter
 *      "logits":FILE  the fp32 logits that follow the last prompt, V values
 *   {"cmd":"verify","id":5,"job":{…},"run":PATH|null}
 *   {"cmd":"memory","id":6}                                          also while nothing is placed
 *   {"cmd":"bench","id":8,"job":{…},"seconds":10}                    the devices of the job, emptied first
 *   {"cmd":"merge","id":9,"model":PATH,"adapter":PATH,"original":PATH|null,"out":FOLDER,"dtype":"auto"|"float16"|"bfloat16"}
 *   {"cmd":"unload","id":7}                                          frees the devices; the process stays; its result: {"held": whether they held anything}
 *   {"cmd":"stop"}                                                   the running command ends at its next action
 *
 * Events, all with "ev", and "t" seconds since the engine started:
 *   {"ev":"ready","version":…}                                       once, first
 *   {"ev":"state","state":"placing"|"warming"|"training"|"evaluating"|"saving"|"generating"|"verifying","text":…}
 *   {"ev":"progress","what":"load","done":n,"total":n}               bytes or steps
 *   {"ev":"start","run":…,"max_steps":n,"epochs":x,"world":n,"backend":…,"dtype":…,"store":…,"schedule":…,"resumed":step,"trainable":…,
 *      "samples_per_step":n,"devices":[{"rank","name","total"}…],"text":["resident (auto: …)"…]}
 *   {"ev":"step","step":n,"loss":x|null,"grad_norm":x|null,"learning_rate":x,"epoch":x,"tokens":n,"tokens_per_second":x,"seconds":x,
 *      "loss_scale":x,"skipped":bool,"loss_bits":"3f9d70a4"}         every optimizer step; loss is fp32, its bits beside it
 *   {"ev":"eval","step":n,"eval_loss":x,"eval_runtime":x,…}
 *   {"ev":"memory","devices":[{"rank","name","bytes":{category:n},"arena":n,"peak":n,"process":n,"used":n,"total":n,"temperature","power"}],
 *      "host":n}
 *   {"ev":"checkpoint","step":n,"path":…}
 *   {"ev":"token","prompt":i,"variant":"adapter"|"base","text":…}
 *   {"ev":"log","level":"info"|"warning","text":…}
 *   {"ev":"error","id":n,"status":"out of memory","text":…,"rank":n,"step":n,"action":"B 3 mb 1 of step 7"}   ends the command
 *   {"ev":"stopped","id":n,"step":n,"checkpoint":PATH|null}                     ends the command
 *   {"ev":"done","id":n,"result":{…}}                                           ends the command
 * Results. train: {"run","step","train_loss","train_runtime","tokens_per_second","adapter":PATH,"log_history":[…]}; eval: HF's eval record;
 * generate: {"texts":[…],"base":[…],"tokens":[[id…]…],"base_tokens":[…]}; verify: {"checks":[{"name","ok","text"}…],"layers":[{"layer","hash","file","ok"}…]}; memory: as the event of
 * that name; bench: {"device","backend","weight":{"rows","cols","bytes","crc32","copy"},"rows":[{"name","value","unit","of_peak","each":[…],"text"}…],"seconds":[{"t","tflops","clock","power",
 * "temperature"}…],"text": to paste}; merge: {"path","decoded","bytes","tensors","merged","dtype"}. */

#define QL_ENGINE_FD 3
#define QL_VERSION   "0.1.0"

#endif
