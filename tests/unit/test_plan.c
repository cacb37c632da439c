#include "core/plan.h"
#include "tests/test.h"

static void choose(ql_choice *c, int world, int g, int schedule, int store, int keep, int save, int train)
{
    memset(c, 0, sizeof *c);
    /* In breadth the micro-batches of a piece go together: few pieces, so that they have some. */
    c->world = world, c->layers = 5, c->first = 1, c->g = g, c->pieces = ql_plan_pieces(g, schedule == QL_BREADTH ? 2 : 8), c->train = train;
    c->schedule = (ql_schedule)schedule;
    for (int l = 0; l < c->layers; l++) {
        c->store[l] = (uint8_t)(store ? store : 1 + l % 4);
        c->keep[l] = (uint8_t)(keep == 3 ? l % 3 : keep);
        c->save[l] = (uint8_t)(save && l % 2);
        if (ql_plan_piped(c) && c->store[l] == QL_STORE_SHARDED) c->store[l] = QL_STORE_HOST;
    }
    /* Of 5 layers: from three stages on some have one, from six on some have none. */
    for (int r = 0; r <= world; r++) c->cut[r] = (int16_t)(c->layers * r / world);
}

TEST(every_plan_is_proven)
{
    int plans = 0;
    ql_choice c;
    for (int world = 1; world <= 8; world++)
        for (int g = 1; g <= 16; g++)
            for (int v = 0; v < QL_SCHEDULES * 5 * 4 * 2 * 2; v++)
                for (int rank = 0; rank < world; rank++) {
                    choose(&c, world, g, v % QL_SCHEDULES, v / QL_SCHEDULES % 5, v / QL_SCHEDULES / 5 % 4,
                           v / QL_SCHEDULES / 20 % 2, v / QL_SCHEDULES / 40);
                    for (int short_g = g; short_g >= 1; short_g = short_g > g / 2 && g > 1 ? g / 2 : 0) {
                        ql_plan p;
                        CHECK_OK(ql_plan_build(&c, rank, short_g, &p));
                        ql_status st = ql_plan_check(&c, &p);
                        ql_plan_free(&p);
                        CHECK_MSG(st == QL_OK, "world %d rank %d g %d of %d variant %d: %s", world, rank, short_g, g, v,
                                  ql_error());
                        plans++;
                    }
                }
    CHECK(plans > 10000);
}

/* A broken plan is found: every single action left out of a good plan, but those whose absence only wastes memory. */
TEST(a_missing_action_is_found)
{
    for (int v = 0; v < QL_SCHEDULES; v++) {
        ql_choice c;
        ql_plan p;
        choose(&c, 2, 8, v, QL_STORE_SHARDED, QL_KEEP_INPUT, v < QL_PIPE, 1);
        CHECK_OK(ql_plan_build(&c, 1, 8, &p));
        for (int i = 0; i < p.count; i++) {
            ql_plan q = p;
            char text[96];
            q.a = malloc((size_t)p.count * sizeof *q.a);
            memcpy(q.a, p.a, (size_t)p.count * sizeof *q.a);
            memmove(q.a + i, q.a + i + 1, (size_t)(p.count - 1 - i) * sizeof *q.a);
            q.count--;
            ql_status st = ql_plan_check(&c, &q);
            ql_error_clear();
            free(q.a);
            ql_action_print(&p.a[i], text, sizeof text);
            CHECK_MSG(st != QL_OK, "schedule %d: action %d (%s) left out is not found", v, i, text);
        }
        ql_plan_free(&p);
    }
}

/* The same for every action done twice, in every schedule and store. */
TEST(a_doubled_action_is_found)
{
    for (int v = 0; v < QL_SCHEDULES * 5; v++) {
        ql_choice c;
        ql_plan p;
        choose(&c, 2, 8, v % QL_SCHEDULES, v / QL_SCHEDULES, 3, 1, 1);
        CHECK_OK(ql_plan_build(&c, 1, 8, &p));
        for (int i = 0; i < p.count; i++) {
            ql_plan q = p;
            q.a = malloc((size_t)(p.count + 1) * sizeof *q.a);
            memcpy(q.a, p.a, (size_t)(i + 1) * sizeof *q.a);
            memcpy(q.a + i + 1, p.a + i, (size_t)(p.count - i) * sizeof *q.a);
            q.count++;
            ql_status st = ql_plan_check(&c, &q);
            char text[96];
            ql_action_print(&p.a[i], text, sizeof text);
            ql_error_clear();
            free(q.a);
            CHECK_MSG(st != QL_OK, "variant %d: action %d (%s) twice is not found", v, i, text);
        }
        ql_plan_free(&p);
    }
}

/* Stages: what each rank does alone may be right, and still not fit together. */
TEST(stages_that_would_wait_for_each_other_are_found)
{
    int found = 0, plans = 0;
    for (int v = 0; v < 2 * 4; v++) {
        ql_choice c;
        ql_plan all[QL_MAX_WORLD];
        choose(&c, v % 4 + 2, 4, v < 4 ? QL_PIPE : QL_PIPE_AHEAD, QL_STORE_RESIDENT, QL_KEEP_INPUT, 0, 1);
        for (int r = 0; r < c.world; r++) CHECK_OK(ql_plan_build(&c, r, 4, &all[r]));
        CHECK_OK(ql_plan_check_world(&c, all));
        /* Any two actions of a rank in the other order, where either is a message or its landing: refused, or as good. */
        for (int r = 0; r < c.world; r++)
            for (int i = 0; i + 1 < all[r].count; i++) {
                ql_action *a = &all[r].a[i], first = a[0];
                if (!ql_plan_link(&a[0]) && !ql_plan_link(&a[1]) && a[0].what != QL_DO_LAND && a[1].what != QL_DO_LAND) continue;
                if (ql_plan_link(&a[0]) && ql_plan_link(&a[1])) continue; /* they go together */
                a[0] = a[1], a[1] = first;
                found += ql_plan_check_world(&c, all) != QL_OK;
                ql_error_clear();
                a[1] = a[0], a[0] = first;
                plans++;
            }
        for (int r = 0; r < c.world; r++) ql_plan_free(&all[r]);
    }
    CHECK(plans > 500 && found * 2 > plans);
}

/* Both stages land a send before they ask for what the other sends: each plan is right by itself, were it not for the other. */
TEST(stages_in_a_deadlock_are_named)
{
    ql_choice c;
    ql_plan all[2];
    choose(&c, 2, 4, QL_PIPE, QL_STORE_RESIDENT, QL_KEEP_ALL, 0, 1);
    for (int r = 0; r < 2; r++) CHECK_OK(ql_plan_build(&c, r, 4, &all[r]));
    for (int r = 0; r < 2; r++) {
        ql_plan *p = &all[r];
        int i = 0;
        while (p->a[i].what != (r ? QL_DO_SEND_DH : QL_DO_SEND_H) || !ql_plan_link(&p->a[i + 1])) i++;
        p->a = realloc(p->a, (size_t)(p->count + 1) * sizeof *p->a);
        memmove(p->a + i + 2, p->a + i + 1, (size_t)(p->count++ - 1 - i) * sizeof *p->a);
        p->a[i + 1] = (ql_action){.what = QL_DO_LAND, .mb = -1, .layer = -1, .slot = -1};
        CHECK_OK(ql_plan_check(&c, p));
        if (r == 0) CHECK_OK(ql_plan_check_world(&c, all)); /* one of them alone does no harm */
    }
    CHECK_FAILS(ql_plan_check_world(&c, all), QL_EINTERNAL, "wait for each other");
    for (int r = 0; r < 2; r++) ql_plan_free(&all[r]);
}

TEST(gathers_are_prefetched_and_counted)
{
    ql_choice c;
    ql_plan p;
    choose(&c, 2, 2, QL_LOOP, QL_STORE_SHARDED, QL_KEEP_INPUT, 0, 1);
    c.first = 0;
    CHECK_OK(ql_plan_build(&c, 0, 2, &p));
    int gathers = 0, ahead = 0;
    for (int i = 0; i < p.count; i++) {
        if (p.a[i].what != QL_DO_GATHER) continue;
        gathers++;
        /* Fetched before the compute of the layer before it is issued. */
        int next = i + 1;
        while (next < p.count && p.a[next].what == QL_DO_GATHER) next++;
        ahead += p.a[next].layer != p.a[i].layer;
    }
    ql_plan_free(&p);
    CHECK_INT(gathers, 2 * 5 - 1); /* 2L − 1: the last layer stays from forward to backward */
    CHECK_INT(ahead, gathers - 1);
}

/* Collectives must match, whatever each rank has to compute: and where one rank's is left out or comes late, that is found. */
TEST(ranks_meet_in_the_same_order)
{
    ql_choice c;
    for (int world = 2; world <= 8; world++)
        for (int g = 1; g <= 9; g++)
            for (int v = 0; v < QL_SCHEDULES * 5 * 2; v++) {
                ql_plan all[QL_MAX_WORLD];
                choose(&c, world, 9, v % QL_SCHEDULES, v / QL_SCHEDULES % 5, QL_KEEP_INPUT, 0, v / QL_SCHEDULES / 5);
                for (int r = 0; r < world; r++) CHECK_OK(ql_plan_build(&c, r, g, &all[r]));
                ql_status st = ql_plan_check_world(&c, all);
                for (int r = 0; r < world; r++) ql_plan_free(&all[r]);
                CHECK_MSG(st == QL_OK, "world %d g %d variant %d: %s", world, g, v, ql_error());
            }
}

TEST(ranks_that_would_wait_for_each_other_are_found)
{
    ql_choice c;
    ql_plan all[2];
    int meetings = 0;
    choose(&c, 2, 3, QL_LOOP, QL_STORE_SHARDED, QL_KEEP_INPUT, 0, 1); /* rank 1 has one micro-batch more than rank 0 */
    for (int r = 0; r < 2; r++) CHECK_OK(ql_plan_build(&c, r, 3, &all[r]));
    CHECK_OK(ql_plan_check_world(&c, all));
    /* Rank 0 without a meeting in which it has no part of its own: no rule of its own plan is broken. */
    for (int i = 0; i < all[0].count; i++) {
        if (all[0].a[i].what != QL_DO_HEAD || all[0].a[i].mb >= 0) continue;
        ql_action gone = all[0].a[i];
        memmove(all[0].a + i, all[0].a + i + 1, (size_t)(all[0].count - 1 - i) * sizeof *all[0].a);
        all[0].count--;
        CHECK_OK(ql_plan_check(&c, &all[0]));
        CHECK_FAILS(ql_plan_check_world(&c, all), QL_EINTERNAL, "wait for each other");
        memmove(all[0].a + i + 1, all[0].a + i, (size_t)(all[0].count - i) * sizeof *all[0].a);
        all[0].a[i] = gone;
        all[0].count++;
        meetings++;
    }
    CHECK_INT(meetings, 1);
    for (int r = 0; r < 2; r++) ql_plan_free(&all[r]);
}

TEST_MAIN(T(every_plan_is_proven), T(a_missing_action_is_found), T(a_doubled_action_is_found), T(stages_that_would_wait_for_each_other_are_found),
          T(stages_in_a_deadlock_are_named), T(gathers_are_prefetched_and_counted),
          T(ranks_meet_in_the_same_order),
          T(ranks_that_would_wait_for_each_other_are_found))
