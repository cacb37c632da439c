#include "core/choose.h"

#include "core/cost.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static void say(ql_reasons *why, const char *fmt, ...) QL_PRINTF(2, 3);
static void say(ql_reasons *why, const char *fmt, ...)
{
    va_list ap;
    if (!why || why->n >= QL_REASONS) return;
    va_start(ap, fmt);
    vsnprintf(why->text[why->n++], QL_REASON_TEXT, fmt, ap);
    va_end(ap);
}

typedef struct {
    char s[24];
} size_text;

static size_text size_of(int64_t bytes)
{
    size_text t;
    int small = bytes < 1 << 30;
    snprintf(t.s, sizeof t.s, small ? "%.1f MiB" : "%.2f GiB", (double)bytes / (small ? 1 << 20 : 1 << 30));
    return t;
}

typedef struct {
    ql_spec *s;
    const ql_args *args;
    const ql_place *place;
    ql_reasons *why;
    int host_later;                 /* 1: host memory is not looked at yet: layers that stay on devices leave the host */
    uint8_t fixed[QL_MAX_LAYERS];   /* 1: the user fixed this layer's store */
    int stage;                      /* of set_keep_stage */
    ql_status st;
} chooser;

static int fits(chooser *c)
{
    int64_t device = 0, host = 0;
    if (c->st != QL_OK) return 0;
    c->st = ql_mem_bytes(c->s, &device, &host);
    return c->st == QL_OK && device <= c->place->capacity && (c->host_later || host <= c->place->host);
}

static void store_all(chooser *c, ql_store_kind k, int from, int to)
{
    for (int l = from; l < to; l++)
        if (!c->fixed[l]) c->s->choice.store[l] = (uint8_t)k;
}

/* Is l among the top n layers? In a pipeline each stage has its share of them at its own top. */
static int among_top(const ql_choice *c, int l, int n)
{
    int lo, hi, r = 0;
    if (!ql_plan_piped(c)) return l >= c->layers - n;
    for (ql_plan_stage(c, r, &lo, &hi); l >= hi;) ql_plan_stage(c, ++r, &lo, &hi);
    return hi - l <= (hi - lo) * n / c->layers;
}

static void keep_top(chooser *c, int n, ql_keep keep, ql_keep rest)
{
    ql_choice *ch = &c->s->choice;
    for (int l = 0; l < ch->layers; l++) ch->keep[l] = (uint8_t)(among_top(ch, l, n) ? keep : rest);
}

static void save_all(chooser *c, int on)
{
    memset(c->s->choice.save, on, (size_t)c->s->choice.layers);
}

/* The largest n in [lo, hi] that fits, given that lo does. */
static int most(chooser *c, int lo, int hi, void (*set)(chooser *c, int n))
{
    while (lo < hi) {
        int mid = (lo + hi + 1) / 2;
        set(c, mid);
        if (fits(c))
            lo = mid;
        else
            hi = mid - 1;
    }
    set(c, lo);
    return lo;
}

static void set_stay(chooser *c, int n) /* n layers stay on the devices, the others rest on the host */
{
    const ql_choice *ch = &c->s->choice;
    ql_store_kind here = ch->world > 1 && !ql_plan_piped(ch) ? QL_STORE_SHARDED : QL_STORE_RESIDENT;
    for (int l = 0; l < ch->layers; l++) store_all(c, among_top(ch, l, ch->layers - n) ? QL_STORE_HOST : here, l, l + 1);
}

static void set_keep_stage(chooser *c, int n)
{
    int lo, hi;
    ql_plan_stage(&c->s->choice, c->stage, &lo, &hi);
    for (int l = lo; l < hi; l++) c->s->choice.keep[l] = l >= hi - n ? QL_KEEP_ALL : QL_KEEP_INPUT;
}

static void set_keep_all(chooser *c, int n) { keep_top(c, n, QL_KEEP_ALL, QL_KEEP_INPUT); }
static void set_cached(chooser *c, int n)
{
    ql_choice *ch = &c->s->choice;
    for (int l = 0; l < ch->layers; l++) store_all(c, among_top(ch, l, n) ? QL_STORE_RESIDENT16 : QL_STORE_RESIDENT, l, l + 1);
}

/* ---- where weights rest ----------------------------------------------------------------------- */

static int count_fixed(const chooser *c)
{
    int n = 0;
    for (int l = 0; l < c->s->choice.layers; l++) n += c->fixed[l];
    return n;
}

static void pick_store(chooser *c)
{
    const ql_fsdp *f = &c->args->fsdp;
    ql_choice *ch = &c->s->choice;
    int n = ch->layers, open = n - count_fixed(c);
    int64_t device = 0, host = 0, sharded = 0;
    const char *which = open < n ? "every other layer" : "every layer";
    if (!open) return; /* all as set */
    if (f->offload) {
        store_all(c, QL_STORE_HOST, 0, n);
        say(c->why, "host: cpu_offload, %s streams from one pinned copy", which);
        return;
    }
    if (f->mode == QL_FSDP_ON && !ql_plan_piped(ch)) {
        store_all(c, f->reshard && ch->world > 1 ? QL_STORE_SHARDED : QL_STORE_RESIDENT, 0, n);
        if (ch->world > 1 && f->reshard)
            say(c->why, "sharded: fsdp, each of %d devices holds 1/%d of %s", ch->world, ch->world, which);
        else if (ch->world > 1)
            say(c->why, "resident: fsdp with reshard_after_forward false keeps %s gathered", which);
        else
            say(c->why, "resident: one device, there is nothing to shard");
        return;
    }
    store_all(c, QL_STORE_RESIDENT, 0, n);
    if (f->mode == QL_FSDP_OFF) {
        say(c->why, "resident: fsdp is off");
        return;
    }
    if (fits(c)) {
        ql_mem_bytes(c->s, &device, &host);
        if (ql_plan_piped(ch)) {
            say(c->why, "resident (auto: the fullest of %d stages fits at %s)", ch->world, size_of(device).s);
        } else if (ch->world > 1) {
            store_all(c, QL_STORE_SHARDED, 0, n);
            ql_mem_bytes(c->s, &sharded, &host);
            store_all(c, QL_STORE_RESIDENT, 0, n);
            /* A small model's gather buffers are more than its shards save. */
            say(c->why, "resident (auto: fits at %s; --fsdp true %s %s)", size_of(device).s, sharded < device ? "shards to" : "would take",
                size_of(sharded).s);
        } else {
            say(c->why, "resident (auto: fits at %s)", size_of(device).s);
        }
        return;
    }
    if (ch->world > 1 && !ql_plan_piped(ch)) {
        store_all(c, QL_STORE_SHARDED, 0, n);
        if (fits(c)) {
            ql_mem_bytes(c->s, &device, &host);
            say(c->why, "sharded (auto: resident does not fit in %s; shards do at %s)", size_of(c->place->capacity).s, size_of(device).s);
            return;
        }
    }
    c->host_later = 1;
    set_stay(c, 0);
    int stay = fits(c) ? most(c, 0, n, set_stay) : -1;
    c->host_later = 0;
    if (stay < 0) return;
    int away = 0;
    for (int l = 0; l < n; l++) away += !c->fixed[l] && ch->store[l] == QL_STORE_HOST;
    say(c->why, "%d layer%s %s, %d streamed from host memory (auto: the most that fits in %s)", open - away, open - away == 1 ? "" : "s",
        ch->world > 1 && !ql_plan_piped(ch) ? "sharded" : "resident", away, size_of(c->place->capacity).s);
}

/* ---- activations ------------------------------------------------------------------------------ */

/* Each stage keeps what its own device has room for: the last one has one micro-batch in flight, the first as many as there are stages. */
static void pick_keep_stages(chooser *c)
{
    ql_choice *ch = &c->s->choice;
    char text[96] = "";
    int n = 0, kept = 0;
    for (c->stage = 0; c->stage < ch->world; c->stage++) {
        int lo, hi;
        ql_plan_stage(ch, c->stage, &lo, &hi);
        int here = most(c, 0, hi - (int)ql_min64(hi, ql_max64(lo, ch->first)), set_keep_stage);
        kept += here;
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%d", c->stage ? ", " : "", here);
    }
    if (kept == ch->layers - ch->first)
        say(c->why, "nothing is recomputed (auto: all activations fit)");
    else
        say(c->why, "recompute (auto): the stages keep %s layers, %d %s recomputed", text, ch->layers - ch->first - kept,
            ch->layers - ch->first - kept == 1 ? "is" : "are");
}

static void pick_keep(chooser *c)
{
    ql_choice *ch = &c->s->choice;
    int learn = ch->layers - ch->first;
    if (c->args->checkpointing == QL_PICK_YES || c->args->activation_offload == QL_PICK_YES) {
        keep_top(c, 0, QL_KEEP_ALL, QL_KEEP_INPUT);
        say(c->why, "every layer is recomputed in backward (%s)",
            c->args->checkpointing == QL_PICK_YES ? "gradient_checkpointing" : "activation_offloading");
        return;
    }
    if (c->args->checkpointing == QL_PICK_NO) {
        keep_top(c, ch->layers, QL_KEEP_ALL, QL_KEEP_ALL);
        say(c->why, "all activations are kept (gradient_checkpointing false)");
        return;
    }
    if (!fits(c)) return;
    if (ql_plan_piped(ch)) {
        pick_keep_stages(c);
        return;
    }
    int kept = most(c, 0, learn, set_keep_all);
    if (kept < learn) {
        /* Layers that cannot be kept whole may still keep all but gate and up. */
        int part = 0;
        for (int n = learn - kept; n > 0; n /= 2) {
            for (int l = ch->layers - kept - part - n; l < ch->layers - kept - part; l++)
                if (l >= ch->first) ch->keep[l] = QL_KEEP_NO_MLP;
            if (fits(c)) {
                part += n;
            } else {
                for (int l = ch->layers - kept - part - n; l < ch->layers - kept - part; l++)
                    if (l >= 0) ch->keep[l] = QL_KEEP_INPUT;
            }
            if (part >= learn - kept) break;
        }
        say(c->why, "recompute (auto): %d layer%s kept, %d recompute gate/up only, %d recompute all", kept, kept == 1 ? "" : "s", part, learn - kept - part);
    } else {
        say(c->why, "nothing is recomputed (auto: all activations fit)");
    }
}

/* What is left over keeps layers dequantised: nothing of them is decoded again. */
static void pick_cache(chooser *c)
{
    ql_choice *ch = &c->s->choice;
    if (c->place->arch == 0 || c->args->fsdp.mode != QL_FSDP_AUTO || c->args->fsdp.offload || count_fixed(c)) return;
    for (int l = 0; l < ch->layers; l++)
        if (ch->store[l] != QL_STORE_RESIDENT || (l >= ch->first && ch->keep[l] != QL_KEEP_ALL)) return;
    int n = most(c, 0, ch->layers, set_cached);
    if (n) say(c->why, "%d of %d layers stay dequantised (auto: memory is left)", n, ch->layers);
}

static ql_status fixed_stores(chooser *c)
{
    ql_choice *ch = &c->s->choice;
    ql_store_kind k[QL_MAX_LAYERS] = {QL_STORE_AUTO};
    QL_TRY(ql_store_parse(c->args->store, ch->layers, k));
    for (int l = 0; l < ch->layers; l++) {
        c->fixed[l] = k[l] != QL_STORE_AUTO;
        ch->store[l] = (uint8_t)(c->fixed[l] ? k[l] : QL_STORE_RESIDENT);
        if (ch->world == 1 && ch->store[l] == QL_STORE_SHARDED) ch->store[l] = QL_STORE_RESIDENT;
        if (ql_plan_piped(ch) && ch->store[l] == QL_STORE_SHARDED)
            QL_FAIL(QL_EINVAL, "layer %d: store sharded shares a layer among devices, a pipeline gives it to one: resident, resident16 or host, "
                    "or --pipeline off", l);
    }
    int fixed = count_fixed(c);
    if (fixed == ch->layers) say(c->why, "store as set");
    else if (fixed) say(c->why, "store of %d layer%s as set", fixed, fixed == 1 ? "" : "s");
    return QL_OK;
}

/* What a stage has, and why. */
static ql_status pick_stages(chooser *c)
{
    ql_choice *ch = &c->s->choice;
    char text[96] = "";
    int n = 0;
    if (ch->world > ch->layers)
        QL_FAIL(QL_EINVAL, "a pipeline of %d stages needs as many layers, this model has %d: fewer --devices, or --pipeline off", ch->world,
                ch->layers);
    ql_cost_cut(c->s, c->s->rows);
    for (int r = 0; r < ch->world; r++)
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%d", r ? ", " : "", ch->cut[r + 1] - ch->cut[r]);
    say(c->why, "pipeline %s: stages of %s layers, even in work with the head on the last", ql_schedule_name(ch->schedule), text);
    return QL_OK;
}

/* What was left to auto has been tried: only the others can still help. */
static ql_status too_large(const ql_args *args, const ql_place *place, int64_t device)
{
    int shares = args->fsdp.mode == QL_FSDP_AUTO || (args->fsdp.mode == QL_FSDP_ON && args->fsdp.reshard);
    QL_FAIL(QL_ENOMEM, "this job needs %s on each device, %s are there. What helps: a shorter --max_length, a smaller "
            "--per_device_train_batch_size%s%s%s%s, more devices; `plan` shows what each way takes", size_of(device).s, size_of(place->capacity).s,
            args->checkpointing == QL_PICK_NO ? ", --gradient_checkpointing true" : "",
            args->activation_offload == QL_PICK_NO ? ", --activation_offloading true" : "",
            place->world > 1 && !shares && args->pipeline < QL_PIPELINE_1F1B ? ", --fsdp true" : "",
            args->adam_8bit && args->adam_paged ? "" : ", --optim paged_adamw_8bit");
}

/* save: layer inputs rest on the host between forward and backward. */
static ql_status choose_with(ql_spec *spec, const ql_args *args, const ql_place *place, ql_reasons *why, ql_schedule schedule, int save)
{
    chooser c = {.s = spec, .args = args, .place = place, .why = why};
    ql_choice *ch = &spec->choice;
    if (ch->layers > QL_MAX_LAYERS) QL_FAIL(QL_ENOSUP, "%d layers: at most %d", ch->layers, (int)QL_MAX_LAYERS);
    ch->schedule = schedule;
    memset(ch->cut, 0, sizeof ch->cut);
    memset(ch->keep, QL_KEEP_INPUT, sizeof ch->keep);
    if (ql_plan_piped(ch)) QL_TRY(pick_stages(&c));
    save_all(&c, save);
    QL_TRY(fixed_stores(&c));
    /* First where weights rest with everything else at its smallest, then what the rest of the memory buys. */
    pick_store(&c);
    if (args->activation_offload == QL_PICK_YES) say(why, "layer inputs rest in host memory between forward and backward");
    pick_keep(&c);
    pick_cache(&c);
    QL_TRY(c.st);
    int64_t device = 0, host = 0;
    QL_TRY(ql_mem_bytes(spec, &device, &host));
    if (device > place->capacity) return too_large(args, place, device);
    if (host > place->host)
        QL_FAIL(QL_ENOMEM, "this job needs %s of host memory for what is offloaded, %s are there. What helps: more devices, a machine with more "
                "(--host_memory asks about one)", size_of(host).s, size_of(place->host).s);
    if (ch->pieces % ch->world && !ql_plan_piped(ch))
        say(why, "not bit-exact on %d devices: %d micro-batches a step make %d equal piece%s, which %d devices do not share evenly", ch->world,
            ch->g, ch->pieces, ch->pieces == 1 ? "" : "s", ch->world);
    return QL_OK;
}

static int some_recomputed(const ql_choice *c)
{
    for (int l = c->first; l < c->layers; l++)
        if (c->keep[l] != QL_KEEP_ALL) return 1;
    return 0;
}

/* Where layers would be recomputed, or nothing fits, what is left to auto may buy memory for more than it costs: inputs that rest on the
 * host, or layers that are shared though each device could hold them, for layers that are kept whole or need not be streamed. */
static ql_status choose_for(ql_spec *spec, const ql_args *args, const ql_place *place, ql_reasons *why, ql_schedule schedule)
{
    static const char *const words[] = {"", "layer inputs rest in host memory", "sharded", "sharded, and layer inputs rest in host memory"};
    int offload = args->activation_offload, world = spec->choice.world;
    int shards = args->fsdp.mode == QL_FSDP_AUTO && !args->fsdp.offload && world > 1 && schedule != QL_PIPE && schedule != QL_PIPE_AHEAD;
    ql_rates r = ql_rates_of(place->arch);
    ql_reasons best = {0};
    ql_choice choice = {0};
    ql_status st = QL_OK;
    char text[1024] = "";
    double least = 0;
    for (int i = 0; i < 4; i++) {
        ql_reasons said = {0};
        ql_args with = *args;
        if (i && ((i & 1 && offload != QL_PICK_AUTO) || (i & 2 && !shards))) continue;
        if (i & 2) with.fsdp.mode = QL_FSDP_ON;
        ql_status got = choose_with(spec, &with, place, &said, schedule, offload == QL_PICK_YES || i & 1);
        double seconds = got == QL_OK ? ql_cost_step(spec, spec->rows, &r) : 0;
        if (i == 0) st = got, choice = spec->choice, best = said, least = seconds, snprintf(text, sizeof text, "%s", ql_error());
        if (i == 0 && ((got != QL_OK && got != QL_ENOMEM) || (got == QL_OK && !some_recomputed(&spec->choice)))) break;
        ql_error_clear();
        if (i == 0 || got != QL_OK || (st == QL_OK && seconds > 0.9 * least)) continue; /* projections are rough */
        if (st == QL_OK)
            say(&said, "%s (auto: %.3g s a step projected, %.3g without)", words[i], seconds, least);
        else
            say(&said, "%s (auto: it does not fit otherwise)", words[i]);
        st = QL_OK, choice = spec->choice, best = said, least = seconds;
    }
    spec->choice = choice;
    for (int i = 0; i < best.n; i++) say(why, "%s", best.text[i]);
    if (st != QL_OK && !ql_error()[0]) return ql_fail(st, "%s", text);
    return st;
}

/* `auto`: a pipeline where it is clearly quicker, or where it fits and nothing else does. */
static ql_status choose_auto(ql_spec *spec, const ql_args *args, const ql_place *place, ql_reasons *why)
{
    static const ql_schedule ways[] = {QL_LOOP, QL_PIPE, QL_PIPE_AHEAD};
    ql_rates r = ql_rates_of(place->arch);
    ql_reasons best = {0};
    ql_choice choice = {0}, smallest = {0};
    double least = 0, plain = 0;
    char words[1024] = "";
    for (int i = 0; i < 3 && (i == 0 || spec->choice.layers >= spec->choice.world); i++) {
        ql_reasons said = {0};
        ql_status st = choose_for(spec, args, place, &said, ways[i]);
        /* Projections are rough: a tenth is no reason to leave the common way. */
        double seconds = st == QL_OK ? ql_cost_step(spec, spec->rows, &r) : 0, counted = i ? seconds / 0.9 : seconds;
        if (st != QL_OK && st != QL_ENOMEM && i == 0) return st;
        if (i == 0) smallest = spec->choice, plain = seconds;
        if (i == 0) snprintf(words, sizeof words, "%s", ql_error());
        ql_error_clear();
        if (st != QL_OK || (least > 0 && counted >= least)) continue;
        least = counted, choice = spec->choice, best = said;
        if (i && plain > 0) say(&best, "pipeline (auto: %.3g s a step projected, %.3g without)", seconds, plain);
        if (i && plain <= 0) say(&best, "pipeline (auto: nothing else fits)");
    }
    spec->choice = least > 0 ? choice : smallest;
    for (int i = 0; i < best.n; i++) say(why, "%s", best.text[i]);
    return least > 0 ? QL_OK : ql_fail(QL_ENOMEM, "%s", words);
}

ql_status ql_choose(ql_spec *spec, const ql_args *args, const ql_place *place, ql_reasons *why)
{
    ql_schedule plain = args->breadth == QL_PICK_YES ? QL_BREADTH : QL_LOOP;
    int alone = spec->choice.world == 1, shards = args->fsdp.mode == QL_FSDP_ON && args->fsdp.reshard && !args->fsdp.offload;
    if (alone && args->pipeline >= QL_PIPELINE_1F1B) say(why, "one device is a pipeline of one stage: a loop");
    if (alone || args->pipeline == QL_PIPELINE_OFF || (args->pipeline == QL_PIPELINE_AUTO && (shards || plain == QL_BREADTH)))
        return choose_for(spec, args, place, why, plain);
    if (args->pipeline == QL_PIPELINE_AUTO) return choose_auto(spec, args, place, why);
    return choose_for(spec, args, place, why, args->pipeline == QL_PIPELINE_1F1B ? QL_PIPE : QL_PIPE_AHEAD);
}
