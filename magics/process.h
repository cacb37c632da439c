/* A program started beside this one: its descriptors, its signals, its end in words. */
#ifndef QL_PROCESS_H
#define QL_PROCESS_H

#include "core/qlora.h"
#include "magics/buf.h"

#include <sys/types.h>

/* argv[0] with descriptor 0 at /dev/null, 1 and 2 at out and err, `three` (if any, else -1) at QL_ENGINE_FD; every signal as at login,
 * a process group of its own. Returns 0 or an errno. */
int ql_process_spawn(char *const argv[], int out, int err, int three, pid_t *pid);
ql_status ql_process_failed(const char *program, int e); /* the error of a spawn */

/* The descriptor above 9, so that it never collides with 0-3, which a spawn fills one after another. Takes fd; -1: an errno. */
int ql_process_fd(int fd);
void ql_process_close(int *fd); /* and -1 in its place */

/* "signal 9, SIGKILL: …" or "exit status 1". Returns buf. */
const char *ql_process_how(int wstatus, char *buf, size_t size);
/* The last lines of a file that a program printed to, blank and unprintable characters aside; nothing where there are none. */
void ql_process_words(int log, ql_buf *out);

#endif
