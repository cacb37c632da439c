// Which signals reach the kernel, and when.
// A signal that arrives while zmq polls makes it throw, and the kernel would die. So those that Python code may
// handle are blocked in all threads, and let through on the main thread only while a cell runs.
#ifndef QLORA_KERNEL_SIGNALS_HPP
#define QLORA_KERNEL_SIGNALS_HPP

#include <atomic>
#include <csignal>
#include <ctime>
#include <pthread.h>

inline sigset_t handled_signals()
{
    sigset_t set;
    sigemptyset(&set);
    for (int s : {SIGINT, SIGALRM, SIGCHLD, SIGUSR1, SIGUSR2, SIGWINCH, SIGVTALRM, SIGPROF, SIGIO})
        sigaddset(&set, s);
    return set;
}

inline pthread_t main_thread;
inline std::atomic<bool> cell_runs{false};

inline void stop_cell()
{
    if (cell_runs) pthread_kill(main_thread, SIGINT);
}

// Lets signals through while it lives. A SIGINT left over from before is not meant for this cell.
class Interruptible
{
  public:
    Interruptible()
    {
        sigset_t interrupt, set = handled_signals();
        sigemptyset(&interrupt);
        sigaddset(&interrupt, SIGINT);
        timespec none = {0, 0};
        while (sigtimedwait(&interrupt, nullptr, &none) == SIGINT) {}
        cell_runs = true;
        pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
    }
    ~Interruptible()
    {
        sigset_t set = handled_signals();
        pthread_sigmask(SIG_BLOCK, &set, nullptr);
        cell_runs = false;
    }
};

#endif
