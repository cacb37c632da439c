/* Any bytes on the engine's command socket: lines → objects → jobs → arguments → steps. What is accepted can be written, read
 * again and is the same; what is refused says why. Input that starts with '=' is "name=value" as typed. */
#include "core/args.h"
#include "core/event.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must_have_text(ql_status st)
{
    if (st != QL_OK && !ql_error()[0]) abort();
    ql_error_clear();
}

static void use(const ql_job *job)
{
    ql_args a;
    ql_steps p;
    json_t *notes = ql_job_notes(job), *lora = ql_job_group(job, "lora");
    json_decref(notes);
    json_decref(lora);
    ql_status st = ql_args_from_job(job, &a);
    if (st == QL_OK) st = ql_steps_plan(&a, 1000, 2, &p);
    if (st == QL_OK) {
        ql_lr lr = a.lr;
        ql_store_kind stores[16];
        lr.warmup = p.warmup, lr.total = p.max_steps;
        for (int64_t s = 0; s < 20 && s < p.max_steps; s++) {
            ql_step_at at = ql_steps_at(&p, s);
            double f = ql_lr_factor(&lr, s);
            if (!isfinite(f) || at.count < 1 || at.first + at.count > p.batches) abort();
            (void)ql_steps_due(&a, &p, s + 1);
        }
        st = ql_store_parse(a.store, 16, stores);
    }
    must_have_text(st);
}

static void round_trip(const ql_job *job)
{
    json_t *once = ql_job_json(job), *twice;
    ql_job *again = NULL;
    if (ql_job_from_json(once, &again) != QL_OK) abort();
    twice = ql_job_json(again);
    if (!json_equal(once, twice)) abort();
    json_decref(once);
    json_decref(twice);
    ql_job_free(again);
}

static void command(const json_t *line)
{
    const json_t *o = json_object_get(line, "job");
    ql_job *job = NULL;
    ql_status st = ql_job_from_json(o ? o : line, &job);
    must_have_text(st);
    if (st == QL_OK) {
        round_trip(job);
        use(job);
    }
    ql_job_free(job);
}

static void typed(const char *text)
{
    char *copy = strdup(text), *eq = copy ? strchr(copy, '=') : NULL;
    ql_job *job = NULL;
    if (eq && ql_job_new(&job) == QL_OK) {
        *eq = 0;
        ql_status st = ql_job_set_text(job, copy, eq + 1);
        must_have_text(st);
        if (st == QL_OK) {
            round_trip(job);
            use(job);
        }
    }
    ql_job_free(job);
    free(copy);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd[2];
    ql_lines *r = NULL;
    ql_lines_state state = QL_LINES_NONE;
    ql_error_clear();
    if (size && data[0] == '=') {
        char *text = strndup((const char *)data + 1, size - 1);
        if (text) typed(text);
        free(text);
        return 0;
    }
    if (size > 60000 || pipe(fd) != 0) return 0; /* a pipe holds 64 KiB */
    if (write(fd[1], data, size) != (ssize_t)size || ql_lines_open(fd[0], &r) != QL_OK) abort();
    close(fd[1]);
    for (size_t lines = 0; state != QL_LINES_END; lines++) {
        json_t *o = NULL;
        if (lines > size + 2) abort(); /* each call takes a line or ends */
        ql_status st = ql_lines_next(r, 0, &state, &o);
        must_have_text(st);
        if (st == QL_OK && state == QL_LINES_ONE) command(o);
        if (state == QL_LINES_ONE) json_decref(o);
    }
    ql_lines_close(r);
    close(fd[0]);
    return 0;
}
