// The threads of a block as fibers on one CPU thread, one block after another.
//
// A fiber runs until it has to wait; the scheduler then goes on with the next one whose wait is over. In turn, that is
// lane after lane and warp after warp. With a seed, the most urgent warp that can goes on, and the rest stays behind as
// far as it is allowed to; which is the most urgent one changes at random, seldom or often.
// When nobody can go on, late work (copies and products that were started and not waited for) is done, piece after
// piece; when there is none either, that is a deadlock, which the report shows.
#include "emulator.h"
#include <algorithm>
#include <map>
#include <random>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string>
#include <sys/mman.h>
#include <vector>
#include <xmmintrin.h>

// Leaves `*from` where this stack is, and goes on with the other.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

namespace emulator {

Index thread_index, block_index, grid_size, block_size;
int thread_number;
uint8_t* shared_memory;
uint32_t shared_end;

namespace {

constexpr size_t STACK_BYTES = 1 << 16, PAGE = 4096;
constexpr uint32_t MOST_SHARED = 227 << 10;  // of a block
constexpr uint8_t UNWRITTEN = 0xff;  // NaN in all formats

struct Fiber {
    uint8_t* stack;
    void* stack_pointer;
    Wait wait;
    bool done;
};

std::vector<Fiber> fibers;  // as many as a launch ever had, for their stacks
void* scheduler;
void (*entry)(const void*);
const void* entry_arguments;
bool late, seeded;
std::mt19937 generator;
std::vector<Work*> late_work;
jmp_buf out;
std::string message;

void run_fiber() {
    entry(entry_arguments);
    fibers[thread_number].done = true;
    emulator_switch(&fibers[thread_number].stack_pointer, scheduler);
}

// A stack with a page below it that nobody may touch.
uint8_t* new_stack() {
    void* memory = mmap(nullptr, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE)) fail("no memory for a thread's stack");
    return static_cast<uint8_t*>(memory) + PAGE;
}

void begin_fiber(Fiber& fiber, int number) {
    // Tops of stacks lie at all offsets in a page, or those of a warp would fall into the same lines of the cache.
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - number % 32 * 128) - 2;
    *top = reinterpret_cast<void*>(run_fiber);
    memset(top - 6, 0, 6 * sizeof(void*));  // the registers that a switch takes from the stack
    fiber.stack_pointer = top - 6, fiber.wait = {}, fiber.done = false;
}

bool is_blocked(const Wait& wait) { return wait.word && (*wait.word & wait.mask) == wait.value; }

void resume(int number) {
    thread_number = number;
    unsigned row = number / block_size.x;
    thread_index = {number % block_size.x, row % block_size.y, row / block_size.y};
    emulator_switch(&scheduler, fibers[number].stack_pointer);
}

[[noreturn]] void report_deadlock(int threads) {
    std::map<std::string, int> waiting;
    for (int i = 0; i < threads; ++i) {
        if (fibers[i].done) continue;
        char line[120];
        snprintf(line, sizeof line, "warp %d: %s %lx", i / 32, fibers[i].wait.what, fibers[i].wait.number);
        ++waiting[line];
    }
    std::string lines;
    for (auto& [line, count] : waiting) lines += "\n  " + std::to_string(count) + " x " + line;
    fail("deadlock in block (%u, %u, %u):%s", block_index.x, block_index.y, block_index.z, lines.c_str());
}

void do_late_work(int threads) {
    if (late_work.empty()) report_deadlock(threads);
    auto next = late_work.begin() + (seeded ? random_number(int(late_work.size())) : 0);
    Work* work = *next;
    late_work.erase(next);
    work->run();
    delete work;
}

// Warps by urgency: in random order, or warpgroups in random order.
void put_in_order(std::vector<int>& warps) {
    std::shuffle(warps.begin(), warps.end(), generator);
    if (random_number(2)) return;
    int groups[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    std::shuffle(groups, groups + 8, generator);
    std::stable_sort(warps.begin(), warps.end(), [&](int a, int b) { return groups[a / 4] < groups[b / 4]; });
}

// The lanes of a warp that can go on, as far as they can for now.
bool run_warp(int warp) {
    bool ran = false;
    int first = seeded ? random_number(32) : 0;
    for (int i = 0; i < 32; ++i) {
        int thread = 32 * warp + (first + i) % 32;
        if (!fibers[thread].done && !is_blocked(fibers[thread].wait)) ran = true, resume(thread);
    }
    return ran;
}

bool is_done(int threads) {
    for (int i = 0; i < threads; ++i)
        if (!fibers[i].done) return false;
    return true;
}

void run_block(int threads) {
    std::vector<int> warps(threads / 32);
    for (int i = 0; i < threads; ++i) begin_fiber(fibers[i], i);
    for (size_t i = 0; i < warps.size(); ++i) warps[i] = i;
    late_work.clear();
    begin_block_meetings(), begin_block_copies(), begin_block_matrices();
    int turns = seeded ? 1 << 3 * random_number(4) : 0;  // that an order lasts, on average
    if (seeded) put_in_order(warps);
    for (;;) {
        if (seeded && random_number(turns) == 0) put_in_order(warps);
        bool ran = false;
        for (int warp : warps) {
            ran |= run_warp(warp);
            if (seeded && ran) break;
        }
        if (!ran && is_done(threads)) return;
        if (!ran || (seeded && !late_work.empty() && random_number(64) == 0)) do_late_work(threads);
    }
}

void on_bad_address(int, siginfo_t* info, void*) { fail("an access at %p, where no array is", info->si_addr); }

}  // namespace

void wait(const Wait& wait) {
    Fiber& fiber = fibers[thread_number];
    int number = thread_number;
    fiber.wait = wait;
    while (is_blocked(fiber.wait)) emulator_switch(&fibers[number].stack_pointer, scheduler);
    fiber.wait = {};
}

void fail(const char* format, ...) {
    char text[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    message = text;
    longjmp(out, 1);
}

bool work_is_late() { return seeded ? random_number(2) : late; }
int random_number(int below) { return int(generator() % below); }
void when_stuck(Work* work) { late_work.push_back(work); }

uint8_t* shared_at(uint32_t address, uint32_t bytes) {
    if (address < DYNAMIC_SHARED_AT || address + bytes > shared_end)
        fail("%u bytes at %u of shared memory, which ends at %u", bytes, address, shared_end);
    if (address % bytes) fail("%u bytes at %u of shared memory, which is misaligned", bytes, address);
    return shared_memory + address;
}

// Runs a kernel; null, or what went wrong.
extern "C" EXPORT const char* emulator_launch(void (*kernel)(const void*), const void* arguments, Index grid,
                                              Index block, uint32_t shared_bytes, int late_, int seed) {
    int threads = block.x * block.y * block.z;
    if (threads % 32 || threads > 1024) return "a block is not of up to 1024 threads in whole warps";
    if (shared_bytes > MOST_SHARED) return "more shared memory than there is";
    if (!shared_memory) shared_memory = static_cast<uint8_t*>(aligned_alloc(1024, 2 * MOST_SHARED));
    grid_size = grid, block_size = block;
    entry = kernel, entry_arguments = arguments, late = late_, seeded = seed != 0;
    generator.seed(seed);
    shared_end = DYNAMIC_SHARED_AT + shared_bytes;

    struct sigaction action = {}, segv, bus;
    action.sa_sigaction = on_bad_address, action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &segv), sigaction(SIGBUS, &action, &bus);
    uint32_t float_mode = _mm_getcsr();
    message.clear();
    if (!setjmp(out)) {
        while (int(fibers.size()) < threads) fibers.push_back({new_stack(), nullptr, {}, true});
        memset(shared_memory, UNWRITTEN, shared_end + 1024);
        _mm_setcsr(float_mode | 0x8040);  // subnormal numbers are flushed to zero
        for (unsigned z = 0; z < grid.z; ++z)
            for (unsigned y = 0; y < grid.y; ++y)
                for (unsigned x = 0; x < grid.x; ++x) block_index = {x, y, z}, run_block(threads);
        for (uint32_t i = shared_end; i < shared_end + 1024; ++i)
            if (shared_memory[i] != UNWRITTEN) fail("a write %u bytes behind the end of shared memory", i - shared_end);
    }
    _mm_setcsr(float_mode);
    sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
    return message.empty() ? nullptr : message.c_str();
}

}  // namespace emulator
