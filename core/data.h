/* Rows of text from files or a front end, and their way to a tokenised dataset. */
#ifndef QL_DATA_H
#define QL_DATA_H

#include "core/chat.h"
#include "core/dataset.h"

/* ---- rows -------------------------------------------------------------------------------------- */

/* Rows are read when asked for; the index takes 8 bytes a row. */
typedef struct ql_table ql_table;

/* files: paths, folders or globs of .jsonl .json .csv .tsv .txt. split: NULL, "train", "train[:10%]",
 * "train[100:-50]"; a name other than train picks files called so inside a folder. */
ql_status ql_table_open(const char *const *files, size_t n, const char *split, ql_table **out) QL_MUST_USE;
/* Rows that a front end hands over, kept as JSON lines in the file `spool` (NULL: a temporary one). */
ql_status ql_table_new(const char *spool, ql_table **out) QL_MUST_USE;
ql_status ql_table_push(ql_table *r, const json_t *row) QL_MUST_USE;
ql_status ql_table_push_lines(ql_table *r, const char *jsonl, size_t n) QL_MUST_USE; /* whole lines */
void ql_table_close(ql_table *r);

int64_t ql_table_count(const ql_table *r);
size_t ql_table_memory(const ql_table *r); /* bytes of the index */
/* Row i as an object; a plain-text file's rows are {"text"}. A broken row is QL_EINVAL and names file and
 * line. */
ql_status ql_table_get(ql_table *r, int64_t i, json_t **out) QL_MUST_USE;
int64_t ql_table_not_utf8(const ql_table *r); /* of the rows got so far, those whose bytes were not UTF-8 */
/* 16 bytes that change when any content does. */
ql_status ql_table_hash(ql_table *r, uint64_t out[2]) QL_MUST_USE;

/* ---- what a row means -------------------------------------------------------------------------- */

typedef enum {
    QL_ROW_UNKNOWN,
    QL_ROW_TEXT,
    QL_ROW_OIG,        /* text that reads "<human>: … <bot>: …" */
    QL_ROW_MESSAGES,
    QL_ROW_SHAREGPT,   /* conversations of {"from","value"} */
    QL_ROW_COMPLETION, /* prompt and completion, strings or messages */
    QL_ROW_ALPACA,     /* instruction, input, output */
    QL_ROW_IDS,        /* tokens already: input_ids, and labels and attention_mask where they are given */
} ql_row_kind;
const char *ql_row_kind_name(ql_row_kind k);

typedef enum {
    QL_LOSS_AUTO,      /* completions of prompt/completion data, everything else in full (TRL's rule) */
    QL_LOSS_ALL,
    QL_LOSS_RESPONSES, /* only what the assistant says, for every kind of row */
} ql_loss_on;

typedef struct {
    const char *text_field;  /* NULL: "text" */
    int64_t max_length;      /* 0: no limit; samples keep their start */
    ql_loss_on loss_on;
    ql_packing packing;
    const char *chat_template; /* NULL: the tokenizer's */
    const char *eos_token;     /* NULL: the tokenizer's */
    const char *cache_dir;     /* NULL: nothing is kept */
    const char *no_tokenizer;  /* why there is none, where there is none */
} ql_data_options;

/* One example, before it is stored. */
typedef struct {
    ql_ids ids;
    uint8_t *trained; /* per id */
    size_t cap;
    bool truncated;
    bool prompt_not_prefix; /* the prompt's tokens are not how prompt + completion begins */
    const char *reason;     /* of a row that failed, in a few words: what skipped rows are counted by */
} ql_example;
void ql_example_free(ql_example *e);

/* A row of a data set whose column has nothing in it: no other row is to be judged by it. */
bool ql_row_is_empty(const json_t *row, const ql_data_options *o);

typedef struct ql_formatter ql_formatter;
/* Recognises the rows by the first one. The tokenizer must outlive the formatter; NULL: rows of ids only. */
ql_status ql_formatter_new(ql_tok *tok, const json_t *first_row, const ql_data_options *o,
                           ql_formatter **out) QL_MUST_USE;
void ql_formatter_free(ql_formatter *f);
ql_row_kind ql_formatter_kind(const ql_formatter *f);
/* Ids and mask of a row. A row that cannot be trained on is QL_EINVAL with the cause. */
ql_status ql_format_row(ql_formatter *f, const json_t *row, ql_example *out) QL_MUST_USE;

/* ---- from rows to a dataset -------------------------------------------------------------------- */

/* Tokenises in a thread of its own. The result is cached in cache_dir under a hash of the content, the
 * tokenizer and the options. */
typedef struct ql_tokenising ql_tokenising;
ql_status ql_tokenise_start(ql_table *rows, ql_tok *tok, const ql_data_options *o,
                            ql_tokenising **out) QL_MUST_USE;
/* done = total: over, well or not; wait says which. */
void ql_tokenise_progress(const ql_tokenising *t, int64_t *done, int64_t *total);
void ql_tokenise_stop(ql_tokenising *t); /* wait then fails with QL_ESTOP */
/* Waits; the dataset's about: {"rows","examples","tokens","trained_tokens","truncated","prompt_not_prefix",
 * "not_utf8","kind","skipped":{reason:count},"first":{reason:text}}. Nothing left to train on is an error that names the
 * cause. */
ql_status ql_tokenise_wait(ql_tokenising *t, ql_dataset **out) QL_MUST_USE;
bool ql_tokenise_cached(const ql_tokenising *t); /* after wait: nothing had to be done */
void ql_tokenise_free(ql_tokenising *t); /* stops it first; NULL is fine */

/* ---- lint -------------------------------------------------------------------------------------- */

/* {"rows","kind","examples","documents","tokens","trained_tokens","longest","truncated",
 * "skipped":{…},"histogram":[{"from","to","count"}…],"warnings":[text…],
 * "samples":[{"text","spans":[[start,end,trained]…]}…]}: what `data --show` shows. Spans are in
 * characters (code points) of the sample's text. */
ql_status ql_data_lint(const ql_dataset *d, const ql_tok *tok, int n_samples, json_t **out) QL_MUST_USE;

#endif
