#include "core/prepare.h"

#include "core/data_files.h"
#include "core/file.h"
#include "core/model.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The files of a data setting: `data` itself, or data_files inside it. */
typedef struct {
    char **path;
    size_t n;
} files;

static void files_free(files *f)
{
    for (size_t i = 0; i < f->n; i++) free(f->path[i]);
    free(f->path);
}

static ql_status files_add(files *f, const char *dir, const char *name)
{
    char path[QL_PATH_MAX];
    char **more = realloc(f->path, (f->n + 1) * sizeof *more);
    if (!more) QL_FAIL(QL_ENOMEM, "data: no memory for file names");
    f->path = more;
    if (dir && ql_path_is_dir(dir) && name[0] != '/')
        QL_TRY(ql_path_join(path, dir, name));
    else
        snprintf(path, sizeof path, "%s", name);
    f->path[f->n] = strdup(path);
    if (!f->path[f->n]) QL_FAIL(QL_ENOMEM, "data: no memory for file names");
    f->n++;
    return QL_OK;
}

static ql_status list_files(const ql_job *job, const char *data, const json_t *inside, files *out)
{
    size_t i;
    json_t *v;
    (void)job;
    if (json_is_string(inside)) return files_add(out, data, json_string_value(inside));
    json_array_foreach(inside, i, v) if (json_is_string(v)) QL_TRY(files_add(out, data, json_string_value(v)));
    if (!out->n) return files_add(out, NULL, data);
    return QL_OK;
}

/* tok is NULL where the model has no tokenizer, or none that is read here: rows of ids need none. */
typedef struct {
    ql_tok *tok;
    char why[1024];
} reader;

static ql_status open_reader(const char *model, reader *out)
{
    char path[QL_PATH_MAX];
    out->tok = NULL;
    snprintf(out->why, sizeof out->why, "the model's folder has no tokenizer.json (transformers writes it with save_pretrained)");
    QL_TRY(ql_path_join(path, model, "tokenizer.json"));
    ql_status st = ql_path_is_file(path) ? ql_tok_open(model, &out->tok) : QL_OK;
    if (st != QL_ENOSUP) return st;
    snprintf(out->why, sizeof out->why, "%s", ql_error());
    ql_error_clear();
    return QL_OK;
}

/* *template is what of it has to be freed. */
static ql_status options(const ql_job *job, const char *cache, int eval, ql_data_options *out, char **template)
{
    const json_t *completion = ql_job_get(job, "completion_only_loss"), *eval_packing = ql_job_get(job, "eval_packing");
    int pack = eval && !json_is_null(eval_packing) ? json_is_true(eval_packing) : ql_job_bool(job, "packing");
    const char *how = ql_job_str(job, "packing_strategy");
    ql_data_options o = {.text_field = ql_job_str(job, "dataset_text_field"),
                         .max_length = ql_job_int(job, "max_length"),
                         .eos_token = ql_job_str(job, "eos_token"),
                         .cache_dir = cache};
    if (pack)
        o.packing = !how                            ? QL_PACK_BFD
                    : strcmp(how, "wrapped") == 0   ? QL_PACK_WRAPPED
                    : strcmp(how, "bfd_split") == 0 ? QL_PACK_BFD_SPLIT
                                                    : QL_PACK_BFD;
    if (ql_job_bool(job, "assistant_only_loss") || ql_job_bool(job, "train_on_responses"))
        o.loss_on = QL_LOSS_RESPONSES;
    else if (json_is_boolean(completion))
        o.loss_on = json_is_true(completion) ? QL_LOSS_RESPONSES : QL_LOSS_ALL;
    if (ql_job_str(job, "chat_template")) QL_TRY(ql_chat_template(ql_job_str(job, "chat_template"), template));
    o.chat_template = *template;
    *out = o;
    return QL_OK;
}

/* What a folder holds for evaluation: its validation set, else its test set; NULL: neither, so all of it is meant. */
static const char *eval_split(const char *folder)
{
    static const char *const names[] = {"validation", "test"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        ql_data_names l = {0};
        ql_status st = ql_data_list(folder, names[i], &l);
        ql_data_names_free(&l);
        if (st == QL_OK) return names[i];
        ql_error_clear();
    }
    return NULL;
}

/* Ids may come from elsewhere, or the tokenizer may be another model's. */
static ql_status within_vocabulary(const char *model, const ql_dataset *d)
{
    ql_config cfg;
    QL_TRY(ql_config_load(model, &cfg));
    long long top = json_integer_value(json_object_get(ql_dataset_about(d), "largest_id")), last = cfg.vocab - 1;
    ql_config_free(&cfg);
    if (top > last) QL_FAIL(QL_EINVAL, "token id %lld in the data; the model's vocabulary ends at %lld: is this its own tokenizer?", top, last);
    return QL_OK;
}

/* Rows of one data setting to a tokenised file in the cache. */
static ql_status tokenise(const ql_job *job, const char *data, const json_t *inside, const reader *r, const char *cache, int eval,
                          ql_prepare_tick tick, void *ctx, ql_dataset **out)
{
    files f = {0};
    ql_table *rows = NULL;
    ql_tokenising *t = NULL;
    ql_dataset *d = NULL;
    ql_status st = QL_OK;
    int64_t done = 0, total = 1;
    char *template = NULL;
    ql_data_options o;
    QL_TRY(options(job, cache, eval, &o, &template));
    o.no_tokenizer = r->why;
    QL_GO(list_files(job, data, inside, &f));
    QL_GO(ql_table_open((const char *const *)f.path, f.n, eval ? eval_split(data) : ql_job_str(job, "split"), &rows));
    QL_GO(ql_tokenise_start(rows, r->tok, &o, &t));
    for (int quiet = 0; done < total; quiet++) {
        ql_tokenise_progress(t, &done, &total);
        if (done >= total) break;
        usleep(2000);
        if (tick && quiet % 100 == 99) {
            st = tick(ctx, eval ? "tokenise the evaluation set" : "tokenise", done, total);
            if (st != QL_OK) {
                ql_tokenise_stop(t);
                goto out;
            }
        }
    }
    QL_GO(ql_tokenise_wait(t, &d));
    QL_GO(within_vocabulary(ql_job_str(job, "model"), d));
    *out = d, d = NULL;
out:
    ql_dataset_close(d);
    ql_tokenise_free(t);
    ql_table_close(rows);
    files_free(&f);
    free(template);
    return st;
}

ql_status ql_prepare_train(const ql_job *job, const char *cache_dir, ql_tok **tok, ql_dataset **out)
{
    const char *model = ql_job_str(job, "model"), *data = ql_job_str(job, "data");
    reader r;
    if (!model) QL_FAIL(QL_EINVAL, "no model: `load NAME` first, its tokenizer reads the data");
    if (!data) QL_FAIL(QL_EINVAL, "no data: `data FILE` first");
    QL_TRY(open_reader(model, &r));
    ql_status st = tokenise(job, data, ql_job_get(job, "data_files"), &r, cache_dir, 0, NULL, NULL, out);
    if (st == QL_OK)
        *tok = r.tok;
    else
        ql_tok_close(r.tok);
    return st;
}

ql_status ql_prepare(const ql_job *job, const char *cache_dir, ql_prepare_tick tick, void *ctx, ql_prepared *out)
{
    const char *model = ql_job_str(job, "model"), *data = ql_job_str(job, "data"), *eval = ql_job_str(job, "eval_dataset");
    reader r;
    ql_dataset *d = NULL;
    ql_status st = QL_OK;
    memset(out, 0, sizeof *out);
    if (!model) QL_FAIL(QL_EINVAL, "no model: `load NAME` first");
    if (!data && !eval) return QL_OK;
    QL_TRY(open_reader(model, &r));
    if (data) {
        QL_GO(tokenise(job, data, ql_job_get(job, "data_files"), &r, cache_dir, 0, tick, ctx, &d));
        snprintf(out->train, sizeof out->train, "%s", ql_dataset_path(d));
        ql_dataset_close(d);
        d = NULL;
    }
    if (eval) {
        QL_GO(tokenise(job, eval, NULL, &r, cache_dir, 1, tick, ctx, &d));
        snprintf(out->eval, sizeof out->eval, "%s", ql_dataset_path(d));
    }
out:
    ql_dataset_close(d);
    ql_tok_close(r.tok);
    return st;
}
