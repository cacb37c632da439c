/* Views as golden text, verbs and their binding, completion. */
#include "magics/live.h"
#include "magics/session.h"
#include "magics/view.h"
#include "tests/test.h"

#include <sys/stat.h>
#include <unistd.h>

static char shown[4000]; /* the last text/plain of each display, one after another */
static char bar[200];    /* the last line that begins with one */
static int new_outputs, updates;

static ql_status show(void *self, const json_t *bundle, const char *id, ql_show_how how)
{
    (void)self, (void)id;
    how == QL_SHOW_NEW ? new_outputs++ : updates++;
    snprintf(shown, sizeof shown, "%.3000s",
             ql_jstr(json_object_get(bundle, "data"), "text/plain", ""));
    const char *at = strstr(shown, "\n[");
    if (at) snprintf(bar, sizeof bar, "%.*s", (int)strcspn(at + 1, "\n"), at + 1);
    return QL_OK;
}

static void print(void *self, const char *text)
{
    (void)self;
    strncat(shown, text, sizeof shown - strlen(shown) - 1);
}

static int interrupts(void *self)
{
    (void)self;
    return 0;
}

static const ql_host host = {.show = show, .print = print, .interrupts = interrupts};

static const char *plain(json_t *bundle)
{
    static char text[4000];
    snprintf(text, sizeof text, "%s", ql_jstr(json_object_get(bundle, "data"), "text/plain", ""));
    json_decref(bundle);
    return text;
}

/* Golden text; what differs is printed whole. */
static int same(const char *text, const char *golden)
{
    if (strcmp(text, golden) != 0) fprintf(stderr, "%s\n--- expected\n%s\n", text, golden);
    return strcmp(text, golden) == 0;
}

TEST(tables)
{
    ql_view v = {0};
    ql_buf names = {0};
    ql_table t;
    ql_table_begin(&t, "step>|name", &names);
    ql_table_cell(&t, "%d", 5);
    ql_table_cell(&t, "a <b> é");
    ql_table_cell(&t, "1,000");
    ql_table_cell2(&t, "x", "<i>x</i>");
    ql_table_cell(&t, "7"); /* a row that is cut short is filled */
    ql_table_end(&v, &t);
    CHECK_STR(ql_buf_str(&v.text),
              " step  name\n─────  ───────\n    5  a <b> é\n1,000  x\n    7\n");
    CHECK(strstr(ql_buf_str(&v.html), ">a &lt;b&gt; é</td>") != NULL);
    CHECK(strstr(ql_buf_str(&v.html), "><i>x</i></td>") != NULL);
    ql_view_free(&v);
    ql_buf_free(&names);
}

TEST(tables_wrap_at_80_columns)
{
    ql_view v = {0};
    ql_buf names = {0};
    ql_table t;
    ql_table_begin(&t, "|", &names);
    ql_table_cell(&t, "key");
    ql_table_cell(
        &t, "%s",
        "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
        "averyveryverylongwordthatdoesnotfitononelineofthepageatallandmustbecutsomewhereanyway");
    ql_table_end(&v, &t);
    for (const char *p = ql_buf_str(&v.text); *p; p += strcspn(p, "\n") + 1)
        CHECK(strcspn(p, "\n") <= 80);
    ql_view_free(&v);
    ql_buf_free(&names);
}

TEST(plan_view)
{
    json_t *p = json_loads(
        "{\"fits\":true,\"chosen\":{\"store\":\"sharded\",\"schedule\":\"loop\"},\"devices\":["
        "{\"rank\":0,\"bytes\":{\"base\":3221225472,\"activations\":1073741824},\"total\":"
        "4294967296,\"capacity\":16106127360},"
        "{\"rank\":1,\"bytes\":{\"base\":3221225472,\"activations\":1073741824},\"total\":"
        "4294967296,\"capacity\":16106127360}],"
        "\"host\":1073741824,\"longest\":8192,\"why\":[\"half of the base on each "
        "device\"],\"exact_worlds\":[1,2,4],"
        "\"alternatives\":[{\"name\":\"resident\",\"per_device\":7516192768,\"host\":0,\"fits\":"
        "true,\"seconds\":1.5,\"longest\":4096}]}",
        0, NULL);
    CHECK(same(plain(ql_view_plan(p, "2xT4")),
               "fits · 2xT4, store sharded, schedule loop\n"
               "device  bytes                                               total\n"
               "──────  ────────────────────────────────────  ───────────────────\n"
               "0       ███████▓▓▓··························  4.00 GiB / 15.0 GiB\n"
               "1       ███████▓▓▓··························  4.00 GiB / 15.0 GiB\n"
               "   category            0         1\n"
               "─  ───────────  ────────  ────────\n"
               "█  base         3.00 GiB  3.00 GiB\n"
               "▓  activations  1.00 GiB  1.00 GiB\n"
               "host memory: 1.00 GiB\n"
               "longest sequence that fits: 8,192 tokens\n"
               "half of the base on each device\n"
               "instead   per device  host    step  longest\n"
               "────────  ──────────  ────  ──────  ───────  ────\n"
               "resident    7.00 GiB   0 B  1.50 s    4,096  fits\n"
               "per device: the least that each way takes, every layer recomputed\n"
               "same bits on 1, 2, 4 devices"));
    json_decref(p);
}

/* Eight stages: the last one, which has the head, is among the numbers, too. */
TEST(plan_of_many_devices)
{
    json_t *p = json_object(), *list = json_array();
    for (int i = 0; i < 8; i++)
        json_array_append_new(list, json_pack("{s:i,s:{s:I,s:I},s:I,s:I}", "rank", i, "bytes", "base", (json_int_t)4 << 30, "head",
                                              i < 7 ? (json_int_t)0 : (json_int_t)1 << 30, "total", (json_int_t)(i < 7 ? 4 : 5) << 30, "capacity",
                                              (json_int_t)15 << 30));
    json_object_set_new(p, "devices", list);
    const char *text = plain(ql_view_plan(p, "8xT4")), *next = text ? strstr(text, "   category         6         7\n") : NULL;
    CHECK(next && strstr(next, "\n█  base      4.00 GiB  4.00 GiB\n▓  head           0 B  1.00 GiB"));
    json_decref(p);
}

TEST(data_view)
{
    json_t *r =
        json_loads("{\"name\":\"d\",\"rows\":1200,\"tokens\":52000,\"trained_tokens\":26000,"
                   "\"skipped\":{\"empty\":3},\"first\":{\"empty\":\"row 2: no text\"},\"truncated\":7,"
                   "\"histogram\":[{\"from\":0,\"to\":64,\"count\":1},{\"from\":64,\"to\":128,\"count\":5},{\"from\":128,\"to\":256,\"count\":0},{\"from\":256,\"to\":512,\"count\":4}],\"warnings\":[\"all "
                   "pads\"],\"samples\":[{\"text\":\"Q: hi\\nA: yo\",\"spans\":[[9,11,true]]}]}",
                   0, NULL);
    CHECK(same(plain(ql_view_data(r)),
               "d · 1,200 rows, 52,000 tokens, 26,000 of them trained on (50 %)\n"
               "rows by their tokens: 0–63: 1, 64–127: 5, 256–511: 4  ▂█▁▇\n"
               "! 3 rows left out: empty; the first: row 2: no text\n! all pads\n  | Q: hi\n  | "
               "A: ‹yo›\nMarked parts are trained on."));
    json_decref(r);
}

/* Spans count characters: a mark never falls into one. */
TEST(data_view_marks_characters)
{
    json_t *r = json_loads("{\"name\":\"d\",\"rows\":1,\"tokens\":9,\"samples\":[{\"text\":\"é你 → ja\",\"spans\":[[0,4,false],[4,99,true]]}]}", 0, NULL);
    CHECK(same(plain(ql_view_data(r)), "d · 1 row, 9 tokens\n  | é你 →‹ ja›\nMarked parts are trained on."));
    json_decref(r);
}

/* What a terminal would obey is shown; wide letters take two columns of a page. */
TEST(data_view_in_a_terminal)
{
    json_t *r = json_loads("{\"name\":\"d\",\"rows\":1,\"tokens\":9,\"samples\":[{\"text\":\"a\\u001b[31m\\u0000b\\r\\n\\u007f\",\"spans\":[[6,8,true]]}]}", JSON_ALLOW_NUL, NULL);
    CHECK(same(plain(ql_view_data(r)), "d · 1 row, 9 tokens\n  | a␛[31m‹␀b›␍\n  | ␡\nMarked parts are trained on."));
    json_decref(r);
    CHECK_INT(ql_text_width("日本 e\xcc\x81 🙂"), 9);
    CHECK_INT(ql_text_fit("日本", 3), 3);
    CHECK_INT(ql_text_fit("e\xcc\x81x", 1), 3);
    CHECK_INT(ql_text_fit("日本", 1), 3);
    CHECK_INT(ql_text_fit("日本", 0), 0);
    CHECK_INT(ql_text_width("\xe6\x97"), 1);
}

/* Reports with wrong types and missing keys are shown as far as they go, and never crash. */
TEST(views_survive_any_report)
{
    static const char *const odd[] = {
        "{}",
        "{\"devices\":5}",
        "{\"devices\":[5,null,{\"bytes\":[1]}]}",
        "{\"devices\":[{\"bytes\":{\"a\":\"x\",\"b\":-5,\"c\":1e300}}]}",
        "{\"samples\":[{\"text\":\"ab\",\"spans\":[[1,99,1],[0,1,1],[-5,1,1],5]}]}",
        "{\"samples\":[5],\"histogram\":[null,\"x\",[],{}]}",
        "{\"checks\":[5,{}],\"rows\":[5],\"alternatives\":[5,{}]}",
        "{\"missing\":[5],\"libraries\":5,\"disks\":[1]}"};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) {
        json_t *r = json_loads(odd[i], 0, NULL);
        plain(ql_view_info(r)), plain(ql_view_model(r)), plain(ql_view_data(r)),
            plain(ql_view_plan(r, NULL));
        plain(ql_view_memory(r)), plain(ql_view_verify(r)), plain(ql_view_bench(r)),
            plain(ql_view_eval(r));
        plain(ql_view_generated(json_object_get(r, "rows"), r));
        json_decref(r);
    }
}

static ql_status feed(ql_live *l, const char *event)
{
    json_t *ev = json_loads(event, 0, NULL);
    ql_status st = ql_live_event(l, ev);
    json_decref(ev);
    return st;
}

TEST(live_view)
{
    ql_live_options o = {.host = &host, .follow = QL_FOLLOW_DISPLAY, .name = "run-1"};
    ql_live *l;
    new_outputs = updates = 0;
    CHECK_OK(ql_live_open(&o, &l));
    CHECK_OK(feed(l, "{\"ev\":\"start\",\"max_steps\":4,\"epochs\":1,\"world\":2,\"backend\":"
                     "\"cpu\",\"dtype\":\"float32\",\"store\":\"sharded\"}"));
    for (int i = 1; i <= 4; i++) {
        char ev[300];
        snprintf(ev, sizeof ev,
                 "{\"ev\":\"step\",\"t\":%d,\"step\":%d,\"loss\":%s,\"learning_rate\":2e-4,\"grad_"
                 "norm\":0.5,\"epoch\":%g,"
                 "\"tokens_per_second\":1234,\"skipped\":%s}",
                 i, i, i == 2 ? "null" : "1.25", i / 4.0, i == 2 ? "true" : "false");
        CHECK_OK(feed(l, ev));
    }
    CHECK_OK(feed(l, "{\"ev\":\"eval\",\"step\":4,\"eval_loss\":1.5}"));
    CHECK_OK(feed(l, "{\"ev\":\"nonsense\"}"));
    CHECK_INT(new_outputs, 0); /* too quick for a live update: only the final state is shown */
    shown[0] = 0;
    CHECK_OK(ql_live_finish(l, "done", NULL));
    CHECK_INT(new_outputs, 2);
    json_t *r = ql_live_record(l);
    CHECK_INT(json_array_size(json_object_get(r, "history")), 5);
    json_decref(r);
    ql_live_close(l);
    CHECK(strstr(shown, "loss · run-1 1.25") != NULL);
}

/* A few steps of very much data: no "epoch 0.00/3e-4". */
TEST(live_view_of_a_small_part_of_an_epoch)
{
    ql_live_options o = {.host = &host, .follow = QL_FOLLOW_DISPLAY, .name = "run-1"};
    ql_live *l;
    CHECK_OK(ql_live_open(&o, &l));
    CHECK_OK(feed(l, "{\"ev\":\"start\",\"max_steps\":60,\"epochs\":0.0003,\"world\":1,\"backend\":\"cpu\"}"));
    CHECK_OK(feed(l, "{\"ev\":\"step\",\"t\":1,\"step\":30,\"loss\":1,\"epoch\":0.00015}"));
    CHECK_OK(ql_live_finish(l, "stopped", NULL));
    ql_live_close(l);
    CHECK(strstr(bar, "30/60  00:00, 0.015 of 0.03 % of an epoch") != NULL);
}

TEST(live_lines)
{
    ql_live_options o = {
        .host = &host, .follow = QL_FOLLOW_LINES, .name = "run-1", .lines_every = 2};
    ql_live *l;
    shown[0] = 0;
    CHECK_OK(ql_live_open(&o, &l));
    CHECK_OK(feed(l, "{\"ev\":\"start\",\"max_steps\":4,\"world\":1,\"backend\":\"cpu\",\"dtype\":"
                     "\"float32\",\"store\":\"resident\"}"));
    for (int i = 1; i <= 4; i++) {
        char ev[200];
        snprintf(ev, sizeof ev,
                 "{\"ev\":\"step\",\"t\":%d,\"step\":%d,\"loss\":2.5,\"learning_rate\":1e-4,\"grad_"
                 "norm\":0.25,\"tokens_per_second\":99}",
                 i, i);
        CHECK_OK(feed(l, ev));
    }
    ql_live_close(l);
    CHECK(same(shown, "run-1: 4 steps on 1 × cpu, float32, resident\n"
                      "step 1/4  loss 2.5000  lr 1e-4     grad 0.25        99 tok/s\n"
                      "step 2/4  loss 2.5000  lr 1e-4     grad 0.25        99 tok/s  00:02 left\n"
                      "step 4/4  loss 2.5000  lr 1e-4     grad 0.25        99 tok/s  00:00 left\n"));
}

TEST(verbs_are_complete)
{
    int n;
    const ql_verb *v = ql_verbs(&n);
    CHECK_INT(n, 18);
    for (int i = 0; i < n; i++) {
        ql_buf b = {0};
        CHECK(v[i].run && v[i].help && v[i].examples && strlen(v[i].help) < 90);
        CHECK_OK(ql_magics_help(v[i].name, &b));
        /* Every example binds. */
        char text[512], *save = NULL;
        snprintf(text, sizeof text, "%s", v[i].examples);
        for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
            ql_call c;
            char *at = strstr(line, "%qlora ");
            if (!at || strncmp(line, "%%", 2) == 0) continue;
            CHECK_OK(ql_call_bind(at + 7, NULL, &c));
            ql_call_free(&c);
        }
        ql_buf_free(&b);
    }
}

static int offers(ql_magics *m, const char *line, const char *word)
{
    json_t *all = ql_magics_complete(m, line), *w;
    size_t i;
    int found = 0;
    json_array_foreach(all, i, w) found |= strcmp(json_string_value(w), word) == 0;
    json_decref(all);
    return found;
}

TEST(completion)
{
    char dir[] = "/tmp/qlora-complete-XXXXXX", path[256];
    CHECK(mkdtemp(dir) != NULL);
    static const char *const folders[] = {"runs",    "runs/run-7",  "hub", "hub/models--org--name",
                                          "bundled", "bundled/tiny"};
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, folders[i]);
        mkdir(path, 0700);
    }
    char runs[256], hub[256], bundled[256];
    snprintf(runs, sizeof runs, "%s/runs", dir), snprintf(hub, sizeof hub, "%s/hub", dir),
        snprintf(bundled, sizeof bundled, "%s/bundled", dir);
    ql_magics_options o = {.runs = runs, .hub = hub, .bundled = bundled};
    ql_magics *m;
    CHECK_OK(ql_magics_open(&o, &host, &m));
    CHECK(offers(m, "%qlora tr", "train") && !offers(m, "%qlora tr", "load"));
    CHECK(offers(m, "", "help") && offers(m, "%%qlora c", "config"));
    CHECK(offers(m, "%qlora train --max_s", "--max_steps") &&
          !offers(m, "%qlora train --use_d", "--use_dora"));
    CHECK(offers(m, "plot ", "run-7") && offers(m, "plot --me", "--metric") &&
          offers(m, "plot --metric g", "grad_norm"));
    CHECK(offers(m, "plot --metric=g", "--metric=grad_norm"));
    CHECK(offers(m, "load t", "tiny") && offers(m, "load org/", "org/name"));
    CHECK(offers(m, "config --packing t", "true") && offers(m, "config --devices c", "cpu:2"));
    CHECK(!offers(m, "nonsense x", "true"));
    ql_magics_close(m);
}

TEST(completion_offers_nothing_that_is_refused)
{
    ql_magics_options o = {0};
    ql_magics *m;
    const ql_setting *s;
    int n = ql_settings(&s), offered = 0;
    CHECK_OK(ql_magics_open(&o, &host, &m));
    for (int i = 0; i < n; i++) {
        char line[128];
        json_t *all, *w;
        size_t k;
        if (s[i].type != QL_SET_CHOICE && s[i].type != QL_SET_BOOL && strcmp(s[i].group, "memory") &&
            strcmp(s[i].name, "devices"))
            continue; /* others are offered files and names */
        snprintf(line, sizeof line, "%%qlora config --%s ", s[i].name);
        all = ql_magics_complete(m, line);
        json_array_foreach(all, k, w)
        {
            ql_job *job;
            const char *word = json_string_value(w);
            if (strncmp(word, "--", 2) == 0) continue;
            CHECK_OK(ql_job_new(&job));
            CHECK_OK(ql_job_set_text(job, s[i].name, word));
            ql_job_free(job);
            offered++;
        }
        json_decref(all);
    }
    CHECK(offered > 100 && offers(m, "config --reduce_dtype f", "float32") &&
          !offers(m, "config --reduce_dtype f", "float16"));
    ql_magics_close(m);
}

TEST_MAIN(T(tables), T(tables_wrap_at_80_columns), T(plan_view), T(plan_of_many_devices), T(data_view), T(data_view_marks_characters), T(data_view_in_a_terminal),
          T(views_survive_any_report), T(live_view), T(live_view_of_a_small_part_of_an_epoch), T(live_lines), T(verbs_are_complete),
          T(completion), T(completion_offers_nothing_that_is_refused))
