// What cells print. Text is collected and sent at 64 KiB, after 0.2 s, and before anything else that shows: a message for
// every print would overrun the sockets. What C code and child processes write to descriptors 1 and 2 comes through pipes
// and is treated alike.
#ifndef QLORA_KERNEL_OUTBOX_HPP
#define QLORA_KERNEL_OUTBOX_HPP

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <poll.h>
#include <string>
#include <sys/eventfd.h>
#include <thread>
#include <unistd.h>

class Outbox
{
  public:
    explicit Outbox(std::function<void(const char *stream, std::string text)> send_text) : publish(std::move(send_text)) {}

    void open()
    {
        wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        for (int i = 0; i < 2; i++) {
            int ends[2];
            if (pipe2(ends, O_CLOEXEC) != 0) continue;
            fcntl(ends[0], F_SETFL, O_NONBLOCK);
            dup2(ends[1], i + 1);
            close(ends[1]);
            pipes[i] = ends[0];
        }
        std::thread([this] { run(); }).detach();
    }

    void write(int stream, const char *data, size_t size)
    {
        if (forked) { // a child of fork() has no part in the protocol: through the pipe to the parent
            while (size > 0) {
                ssize_t n = ::write(stream + 1, data, size);
                if (n <= 0) return;
                data += n, size -= static_cast<size_t>(n);
            }
            return;
        }
        std::lock_guard<std::mutex> hold(mutex);
        append(stream, data, size);
    }

    void flush()
    {
        if (forked) return;
        std::lock_guard<std::mutex> hold(mutex);
        drain();
        send(true);
    }

    std::atomic<bool> forked{false};

  private:
    void append(int stream, const char *data, size_t size)
    {
        if (stream != current) send(true);
        if (text.empty() && size > 0) {
            since = Clock::now();
            uint64_t one = 1;
            if (::write(wake, &one, sizeof one) < 0) {} // full means: awake already
        }
        current = stream;
        text.append(data, size);
        if (text.size() >= 65536) send(false);
    }

    void drain()
    {
        char buffer[16384];
        for (int i = 0; i < 2; i++)
            for (ssize_t n; pipes[i] >= 0 && (n = read(pipes[i], buffer, sizeof buffer)) > 0;)
                append(i, buffer, static_cast<size_t>(n));
    }

    // All of it, or up to the last whole UTF-8 character when more is to come.
    void send(bool all)
    {
        size_t n = text.size();
        for (size_t back = 1; !all && back <= 3 && back <= text.size(); back++) {
            unsigned char c = static_cast<unsigned char>(text[text.size() - back]);
            if (c < 0x80) break;
            if (c < 0xC0) continue;
            if (back < (c >= 0xF0 ? 4u : c >= 0xE0 ? 3u : 2u)) n = text.size() - back;
            break;
        }
        if (n == 0) return;
        publish(current == 0 ? "stdout" : "stderr", text.substr(0, n));
        text.erase(0, n);
        since = Clock::now();
    }

    void run()
    {
        const bool watch_parent = std::getenv("JPY_PARENT_PID") != nullptr;
        const pid_t parent = getppid();
        for (;;) {
            int wait = 1000;
            {
                std::lock_guard<std::mutex> hold(mutex);
                drain();
                if (!text.empty()) {
                    auto age = std::chrono::duration_cast<milliseconds>(Clock::now() - since).count();
                    if (age >= 200) send(false);
                    else wait = static_cast<int>(200 - age);
                }
            }
            // A kernel whose front end was killed would live for ever: nobody else can end it.
            if (watch_parent && getppid() != parent) _exit(1);
            pollfd fds[3] = {{wake, POLLIN, 0}, {pipes[0], POLLIN, 0}, {pipes[1], POLLIN, 0}};
            poll(fds, 3, wait);
            uint64_t count;
            if (read(wake, &count, sizeof count) < 0) {} // none: a time-out
        }
    }

    using Clock = std::chrono::steady_clock;
    using milliseconds = std::chrono::milliseconds;

    const std::function<void(const char *, std::string)> publish;
    std::mutex mutex;
    std::string text;
    int current = 0, wake = -1, pipes[2] = {-1, -1};
    Clock::time_point since;
};

#endif
