/* The engine seen from a cell: a process of its own, JSON lines over a socketpair. No threads: the
 * cell waits in ql_client_command, looks for the user's stop every 100 ms, and hands events to a
 * callback. */
#ifndef QL_CLIENT_H
#define QL_CLIENT_H

#include "magics/magics.h"

typedef struct ql_client ql_client;

/* Called for each event of the running command. What it returns, when not QL_OK, is the command's
 * result once the engine has been stopped. */
typedef ql_status (*ql_client_event)(void *self, const json_t *event);
/* Called about every 100 ms, for views that move with the clock. NULL: not wanted. */
typedef void (*ql_client_tick)(void *self);

/* Nothing is started yet: the first command does that. The host must outlive the client. */
ql_status ql_client_open(const char *engine, int ready_ms, const ql_host *host, ql_client **out);
void ql_client_close(ql_client *c);
void ql_client_forked(ql_client *c); /* in the child of a fork: the engine is the parent's */

/* Sends {"cmd": …} (an "id" is added) and waits for its end. *result: of "done", a new reference.
 *   QL_ESTOP   stopped by the user; *result is the "stopped" event, as it is where `event` failed and the work was stopped for that
 *   QL_EPEER   the engine died or spoke nonsense: the text has the signal and its last words; the
 * next command starts a fresh engine */
ql_status ql_client_command(ql_client *c, json_t *command, ql_client_event event,
                            ql_client_tick tick, void *self, json_t **result);

/* `qlora-engine --devices`: its JSON. */
ql_status ql_client_devices(ql_client *c, json_t **out);

int ql_client_running(const ql_client *c);         /* an engine is alive */
const char *ql_client_version(const ql_client *c); /* of the running engine; "" */

#endif
