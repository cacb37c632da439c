/* Allocations and collectives that fail, on each rank in turn: the rank's own words come out, nobody hangs, and the next run is
 * whole. (What the engine process makes of ranks that die is in tests/py/test_engine.py.) */
#include "tests/exact/exact.h"

typedef enum { FAIL_ALLOC, FAIL_HOST_ALLOC, FAIL_GATHER, FAIL_EXCHANGE, FAIL_SEND, FAIL_RECV, FAIL_LAND, KILL_SEND, KILL_RECV, KILL_LAND } fault_kind;
static struct {
    fault_kind kind;
    int rank, at; /* the at-th call on this rank fails, from 1 */
    int seen;
} fault;
static ql_dev_table dev_table;
static ql_comm_table comm_table;
static const ql_backend *real;

static int hit(fault_kind kind)
{
    if (kind != fault.kind || ++fault.seen != fault.at) return 0;
    exact_mem->struck = ql_now();
    return 1;
}

static ql_status bad_alloc(ql_dev *d, int64_t bytes, void **out)
{
    if (hit(FAIL_ALLOC)) QL_FAIL(QL_ENOMEM, "made to fail: allocation %d", fault.at);
    return real->dev->alloc(d, bytes, out);
}

static ql_status bad_host_alloc(ql_dev *d, int64_t bytes, void **out)
{
    if (hit(FAIL_HOST_ALLOC)) QL_FAIL(QL_ENOMEM, "made to fail: host allocation %d", fault.at);
    return real->dev->host_alloc(d, bytes, out);
}

static ql_status bad_gather(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    if (hit(FAIL_GATHER)) QL_FAIL(QL_EPEER, "made to fail: all_gather %d", fault.at);
    return real->comm->all_gather(c, s, out, in);
}

static ql_status bad_exchange(ql_comm *c, ql_stream *s, ql_tensor out, ql_tensor in)
{
    if (hit(FAIL_EXCHANGE)) QL_FAIL(QL_EPEER, "made to fail: all_to_all %d", fault.at);
    return real->comm->all_to_all(c, s, out, in);
}

static ql_status bad_send(ql_comm *c, ql_stream *s, ql_tensor x, int to)
{
    if (hit(KILL_SEND)) kill(getpid(), SIGKILL);
    if (hit(FAIL_SEND)) QL_FAIL(QL_EPEER, "made to fail: send %d", fault.at);
    return real->comm->send(c, s, x, to);
}

static ql_status bad_recv(ql_comm *c, ql_stream *s, ql_tensor x, int from)
{
    if (hit(KILL_RECV)) kill(getpid(), SIGKILL);
    if (hit(FAIL_RECV)) QL_FAIL(QL_EPEER, "made to fail: recv %d", fault.at);
    return real->comm->recv(c, s, x, from);
}

static ql_status bad_land(ql_comm *c, int *over)
{
    if (hit(KILL_LAND)) kill(getpid(), SIGKILL);
    if (hit(FAIL_LAND)) QL_FAIL(QL_EPEER, "made to fail: land %d", fault.at);
    return real->comm->land(c, over);
}

static const ql_backend *faulty(int rank, const ql_backend *be)
{
    static ql_backend mine;
    if (rank != fault.rank) return be;
    real = be;
    dev_table = *be->dev, comm_table = *be->comm;
    dev_table.alloc = bad_alloc, dev_table.host_alloc = bad_host_alloc;
    comm_table.all_gather = bad_gather, comm_table.all_to_all = bad_exchange;
    comm_table.send = bad_send, comm_table.recv = bad_recv, comm_table.land = bad_land;
    mine = (ql_backend){be->name, &dev_table, be->ops, &comm_table};
    return &mine;
}

/* Runs with the fault. How many seconds after it the run had ended, and what was said, "" if the fault was never reached. */
static double run_with(fault_kind kind, int rank, int at, char said[600])
{
    exact_setting s = {.world = 2, .store = 1, .save = 1, .paged = 1};
    exact_outcome o = {0};
    if (kind >= FAIL_SEND) s = (exact_setting){.model = 2, .world = 3, .group = 6, .schedule = QL_PIPE_AHEAD, .store = 2};
    fault.kind = kind, fault.rank = rank, fault.at = at, fault.seen = 0;
    exact_wrap = faulty;
    ql_status st = exact_run(&s, &o);
    snprintf(said, 600, "%s", st == QL_OK ? "" : ql_error());
    ql_error_clear();
    exact_wrap = NULL;
    free(o.adapters);
    return ql_now() - exact_mem->struck;
}

static void sweep(fault_kind kind, int step, int least)
{
    char want[64], said[600];
    int found = 0, each = kind == FAIL_GATHER || kind == FAIL_EXCHANGE ? 6 : 4; /* two of these while loading */
    for (int rank = 0; rank < (kind >= FAIL_SEND ? 3 : 2); rank++)
        for (int at = 1; at < 400; at = at < each ? at + 1 : at + step) {
            double took = run_with(kind, rank, at, said);
            if (!said[0]) break;
            snprintf(want, sizeof want, kind >= KILL_SEND ? "rank %d died" : "rank %d: ", rank);
            CHECK_MSG(strstr(said, want) && strstr(said, kind >= KILL_SEND ? "signal 9" : "made to fail"), "fault %d at call %d of rank %d is told as: %s", kind, at, rank, said);
            CHECK_MSG(took < 10, "fault %d at call %d of rank %d took %.1f s", kind, at, rank, took);
            found++;
        }
    CHECK_MSG(found >= least, "only %d faults were reached", found);
}

TEST(device_allocations_fail) { sweep(FAIL_ALLOC, 1, 2); }
TEST(host_allocations_fail) { sweep(FAIL_HOST_ALLOC, 1, 6); }
/* What it was for, how much, and what to do: of all that such a run takes. */
TEST(host_memory_that_is_not_there_is_explained)
{
    static const char *const uses[] = {"batches", "offloaded activations", "paged optimizer states"};
    char said[600];
    int found = 0;
    for (int at = 1; at < 20; at++) {
        run_with(FAIL_HOST_ALLOC, 1, at, said);
        if (!said[0]) break;
        for (int i = 0; i < 3; i++) found |= strstr(said, uses[i]) ? 1 << i : 0;
        CHECK_MSG(strstr(said, " GiB of pinned host memory for ") && strstr(said, "`ulimit -l unlimited`") && strstr(said, "less offloaded") &&
                      strstr(said, "--host_memory"), "allocation %d: %s", at, said);
    }
    CHECK_INT(found, 7);
}
TEST(gathers_fail) { sweep(FAIL_GATHER, 97, 12); }
TEST(exchanges_fail) { sweep(FAIL_EXCHANGE, 41, 10); }
/* Between three stages: the first, the last, and one with two neighbours. */
TEST(sends_fail) { sweep(FAIL_SEND, 151, 9); }
TEST(receives_fail) { sweep(FAIL_RECV, 151, 9); }
TEST(landings_fail) { sweep(FAIL_LAND, 211, 9); }
TEST(stages_die_sending) { sweep(KILL_SEND, 151, 9); }
TEST(stages_die_receiving) { sweep(KILL_RECV, 151, 9); }
TEST(stages_die_waiting) { sweep(KILL_LAND, 211, 9); }

/* What comes after is not the worse for it. */
TEST(the_next_run_is_whole)
{
    exact_setting s = {.world = 2, .store = 1, .save = 1, .paged = 1}, one = {.world = 1};
    exact_outcome a = {0}, b = {0};
    CHECK_OK(exact_run(&one, &a));
    CHECK_OK(exact_run(&s, &b));
    CHECK_OK(exact_differs(&s, &a, &b));
    free(a.adapters);
    free(b.adapters);
}

static const test_entry tests[] = {T(device_allocations_fail), T(host_allocations_fail),
                                   T(host_memory_that_is_not_there_is_explained), T(gathers_fail), T(exchanges_fail),
                                   T(sends_fail), T(receives_fail), T(landings_fail), T(stages_die_sending), T(stages_die_receiving),
                                   T(stages_die_waiting),
                                   T(the_next_run_is_whole)};

int main(int argc, char **argv)
{
    ql_backend_cpu_start(argv);
    FILE *hold = fopen("/dev/null", "r"); /* ranks close the engine's descriptor */
    int failed = test_run(tests, (int)(sizeof tests / sizeof *tests), argc, argv);
    if (hold) fclose(hold);
    return failed;
}
