#include "magics/process.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

void ql_process_close(int *fd)
{
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

int ql_process_fd(int fd)
{
    int high = fcntl(fd, F_DUPFD_CLOEXEC, 10);
    close(fd);
    return high;
}

/* The parent's environment, with BLAS told to start no thread: the engine forks its ranks. */
static char **spawn_environment(void)
{
    static char blas[] = "OPENBLAS_NUM_THREADS=1";
    size_t n = 0;
    while (environ[n]) n++;
    char **env = calloc(n + 2, sizeof *env);
    size_t k = 0;
    for (size_t i = 0; env && i < n; i++)
        if (strncmp(environ[i], "OPENBLAS_NUM_THREADS=", 21) != 0) env[k++] = environ[i];
    if (env) env[k] = blas;
    return env;
}

int ql_process_spawn(char *const argv[], int out, int err, int three, pid_t *pid)
{
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attr;
    sigset_t none, all;
    char **env = spawn_environment();
    if (!env) return ENOMEM;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawn_file_actions_init(&files);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_addopen(&files, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, out, 1);
    posix_spawn_file_actions_adddup2(&files, err, 2);
    if (three >= 0) posix_spawn_file_actions_adddup2(&files, three, QL_ENGINE_FD);
    posix_spawnattr_setpgroup(&attr, 0);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK |
                                        POSIX_SPAWN_SETSIGDEF);
    int e = posix_spawnp(pid, argv[0], &files, &attr, argv, env);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attr);
    free(env);
    return e;
}

ql_status ql_process_failed(const char *engine, int e)
{
    QL_FAIL(QL_EIO, "the engine %s does not start: %s%s", engine, strerror(e),
            e == ENOENT ? "; build it with `make`, or name it in QLORA_ENGINE" : "");
}

void ql_process_words(int log, ql_buf *out)
{
    char tail[2049];
    off_t size = log >= 0 ? lseek(log, 0, SEEK_END) : 0;
    off_t from = size > 2048 ? size - 2048 : 0;
    ssize_t n = size > 0 ? pread(log, tail, 2048, from) : 0;
    if (n <= 0) return;
    while (n > 0 && isspace((unsigned char)tail[n - 1])) n--;
    tail[n] = 0;
    char *p = tail + n;
    for (int lines = 0; p > tail; p--)
        if (p[-1] == '\n' && ++lines == 8) break;
    if (p == tail && from > 0) p = strchr(tail, '\n') ? strchr(tail, '\n') + 1 : tail;
    for (char *s = p; *s; s++)
        if ((unsigned char)*s < ' ' && *s != '\n' && *s != '\t') *s = ' ';
    if (*p) ql_buf_printf(out, "\nIts last words:\n%s", p);
}

const char *ql_process_how(int wstatus, char *buf, size_t size)
{
    if (WIFSIGNALED(wstatus)) {
        int s = WTERMSIG(wstatus);
        const char *name = sigabbrev_np(s), *text = sigdescr_np(s);
        snprintf(buf, size, "signal %d, SIG%s: %s%s", s, name ? name : "?", text ? text : "?",
                 s == SIGKILL ? "; often the system's out-of-memory killer" : "");
    } else {
        snprintf(buf, size, "exit status %d", WIFEXITED(wstatus) ? WEXITSTATUS(wstatus) : -1);
    }
    return buf;
}
