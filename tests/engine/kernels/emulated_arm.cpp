// Calls functions of a shared library for another process, with that process's memory at its own addresses: see
// emulated_arm.py. Arguments: the library, and a file descriptor of the other process's /proc/self/mem.
#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

// emulated_arm.py has the same.
struct Request {
    char name[48];
    int64_t integers[8];
    float floats[2];
    int64_t is_double;  // what the function returns
};
union Reply {
    int64_t integer;
    double number;
};

constexpr size_t kPage = 4096;
constexpr size_t kTogether = 32 * kPage;  // fetched at a time, where so much is there
constexpr size_t kMostBytes = size_t{1} << 30;

// Memory of the other process that a call has touched, and what it held.
struct Piece {
    char *address, *before;
    size_t bytes;
};

int memory;
char* store;  // what pieces held, one after another
size_t stored;
Piece pieces[kMostBytes / kTogether];
size_t num_pieces;
std::atomic_flag busy = ATOMIC_FLAG_INIT;

char* map(size_t bytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    return static_cast<char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0));
}

// Fetches the page that a thread has missed, and some that follow it. They come into their place as a whole, for other
// threads may read them at once.
bool fetch(char* address) {
    if (msync(address, kPage, MS_ASYNC) == 0) return true;  // it is mapped: another thread was first
    if (num_pieces == sizeof pieces / sizeof *pieces || stored + kTogether > kMostBytes) return false;
    size_t most = kTogether;
    for (size_t i = 0; i < num_pieces; i++)
        if (pieces[i].address > address) most = std::min(most, static_cast<size_t>(pieces[i].address - address));
    char* const before = store + stored;
    const ssize_t bytes = pread(memory, before, most, reinterpret_cast<off_t>(address)) / kPage * kPage;
    if (bytes <= 0) return false;
    char* const copy = map(bytes);
    std::memcpy(copy, before, bytes);
    if (mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) != address) return false;
    pieces[num_pieces++] = {address, before, static_cast<size_t>(bytes)};
    stored += bytes;
    return true;
}

void on_fault(int, siginfo_t* info, void*) {
    char* const address = static_cast<char*>(info->si_addr);
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
    const bool is_there = fetch(address - reinterpret_cast<uintptr_t>(address) % kPage);
    busy.clear(std::memory_order_release);
    if (!is_there) signal(SIGSEGV, SIG_DFL);  // the other process has no such page, either: the next try ends this one
}

// Writes back what has changed, and forgets the piece. What else lies there may belong to somebody who changes it
// meanwhile; he has no part of an allocator's smallest unit.
void give_back(const Piece& piece) {
    constexpr size_t kUnit = 16;
    const auto is_new = [&](size_t i) { return std::memcmp(piece.address + i, piece.before + i, kUnit) != 0; };
    for (size_t i = 0; i < piece.bytes; i += kUnit) {
        const size_t start = i;
        while (i < piece.bytes && is_new(i)) i += kUnit;
        char* const from = piece.address + start;
        if (i > start && pwrite(memory, from, i - start, reinterpret_cast<off_t>(from)) < 0) std::abort();
    }
    munmap(piece.address, piece.bytes);
}

// Integers and pointers lie in x0 to x7, floats in s0 and s1, whatever the order in which a function takes them.
Reply call(void* function, const Request& r) {
    const int64_t* i = r.integers;
    Reply reply;
    if (r.is_double) {
        using Function = double (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float);
        reply.number = reinterpret_cast<Function>(function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], r.floats[0],
                                                            r.floats[1]);
    } else {
        using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, float, float);
        reply.integer = reinterpret_cast<Function>(function)(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7],
                                                             r.floats[0], r.floats[1]);
    }
    return reply;
}

}  // namespace

// What the other process reads of its own memory through this one, to see that both mean the same addresses.
extern "C" __attribute__((visibility("default"))) int64_t read_number(const int64_t* number) { return *number; }

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    memory = std::atoi(arguments[2]);
    store = map(kMostBytes);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);

    Request request;
    while (std::fread(&request, sizeof request, 1, stdin) == 1) {
        void* function = std::strcmp(request.name, "read_number") == 0 ? reinterpret_cast<void*>(read_number)
                                                                       : dlsym(library, request.name);
        if (function == nullptr) return 2;
        const Reply reply = call(function, request);
        for (size_t i = 0; i < num_pieces; i++) give_back(pieces[i]);
        num_pieces = stored = 0;
        std::fwrite(&reply, sizeof reply, 1, stdout);
        std::fflush(stdout);
    }
    return 0;
}
