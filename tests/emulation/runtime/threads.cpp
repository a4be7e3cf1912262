// The threads of a block as fibers on one CPU thread, one block after another; those of a cluster of blocks at a time.
//
// A fiber runs until it has to wait; the scheduler then continues with the next one whose wait is over. Without a seed
// the order is lane after lane and warp after warp. With a seed the most urgent runnable warp continues, and the others lag
// behind as far as they can; the most urgent warp changes at random, rarely or often.
// When no fiber can continue, late work (copies and products that were started and not waited for) is done, item by
// item; without late work it is a deadlock, which is reported.
//
// A kernel that was launched to overlap with the one ahead of it runs first, until no fiber can continue before the end of
// the kernel ahead (griddepcontrol.wait): then that one runs to its end, on separate fibers and shared memory.
#include "emulator.h"
#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string>
#include <sys/mman.h>
#include <vector>
#include <xmmintrin.h>

// Saves this stack in `*from`, and continues with the other. A jump, as the CPU would predict a return to this stack.
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
    popq %rcx
    jmp *%rcx
)");

namespace emulator {

Index thread_index, block_index, grid_size, block_size;
int thread_number, cluster_rank, cluster_size, fiber_number;
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
    bool done, begun;
    int thread, rank;  // its number in its block, and the block's in the cluster
    Index index;
};

// The launch that Python requests.
struct Launch {
    const char* name;
    void (*kernel)(const void*);
    const void* arguments;
    Index grid, block;
    uint32_t shared_bytes, cluster;
    int late, seed, kept_back;
    const Launch* ahead;  // the kernel that this one may overlap with, or null
};

// A kernel, the one ahead of it, and so on, have separate fibers and shared memory, which later launches reuse.
struct Level {
    std::vector<Fiber> fibers;
    std::vector<uint8_t*> shared;  // of each block of a cluster
};
std::vector<Level> levels;

// The running kernel.
struct Running {
    const Launch* launch = nullptr;
    bool seeded = false;
    std::mt19937 generator;
    std::vector<std::pair<Work*, int>> late_work;  // with the rank of its block
    Index first_block;                             // of the cluster
    void* scheduler = nullptr;
    Fiber* fibers = nullptr;
    std::vector<char> alike;  // of each warp: its lanes, when they ran last
    struct { int warp, first, next; } turn;  // of the running warp: lanes run in order from `first` on
    size_t level = 0;
};
Running now;
uint64_t kernel_ahead_is_to_come;  // 1 while it is
jmp_buf out;
std::string message;

void run_kernel(const Launch& launch);
void leave(Fiber& fiber);

void run_fiber() {
    now.launch->kernel(now.launch->arguments);
    now.fibers[fiber_number].done = true;
    leave(now.fibers[fiber_number]);
}

// A stack with an inaccessible page below it.
uint8_t* new_stack() {
    void* memory = mmap(nullptr, PAGE + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, PAGE, PROT_NONE)) fail("no memory for a thread's stack");
    return static_cast<uint8_t*>(memory) + PAGE;
}

int threads_of_block() { return block_size.x * block_size.y * block_size.z; }

void place_fiber(Fiber& fiber, int number) {
    fiber.thread = number % threads_of_block(), fiber.rank = number / threads_of_block();
    unsigned row = fiber.thread / block_size.x;
    fiber.index = {fiber.thread % block_size.x, row % block_size.y, row / block_size.y};
}

void begin_fiber(Fiber& fiber, int number) {
    // Tops of stacks have different offsets in a page, or those of a warp would map to the same cache lines.
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - number % 32 * 128) - 2;
    *top = reinterpret_cast<void*>(run_fiber);
    memset(top - 6, 0, 6 * sizeof(void*));  // the registers that a switch pops
    fiber.stack_pointer = top - 6, fiber.wait = {}, fiber.done = fiber.begun = false;
}

bool is_blocked(const Wait& wait) { return wait.word && (*wait.word & wait.mask) == wait.value; }

void enter_block(int rank) {
    cluster_rank = rank, shared_memory = levels[now.level].shared[rank];
    block_index = {now.first_block.x + rank, now.first_block.y, now.first_block.z};
}

// The next lane of the running warp that can continue in this turn, or -1.
int next_lane() {
    while (now.turn.next < 32) {
        int number = 32 * now.turn.warp + (now.turn.first + now.turn.next++) % 32;
        if (!now.fibers[number].done && !is_blocked(now.fibers[number].wait)) return number;
    }
    return -1;
}

// Continue with a lane; `from` keeps the stack that this one leaves.
void resume(int number, void** from) {
    Fiber& fiber = now.fibers[number];
    fiber_number = number, thread_number = fiber.thread, thread_index = fiber.index;
    if (fiber.rank != cluster_rank) enter_block(fiber.rank);
    fiber.begun = true;
    emulator_switch(from, fiber.stack_pointer);
}

// Continue with the warp's next lane or, after its last one, with the scheduler.
void leave(Fiber& fiber) {
    int next = next_lane();
    if (next < 0) emulator_switch(&fiber.stack_pointer, now.scheduler);
    else resume(next, &fiber.stack_pointer);
}

[[noreturn]] void report_deadlock(int threads) {
    std::map<std::string, int> waiting;
    for (int i = 0; i < threads; ++i) {
        const Fiber& fiber = now.fibers[i];
        if (fiber.done) continue;
        char line[120];
        snprintf(line, sizeof line, "warp %d: %s %lx", i / 32, fiber.wait.what, fiber.wait.number);
        ++waiting[line];
    }
    std::string lines;
    for (auto& [line, count] : waiting) lines += "\n  " + std::to_string(count) + " x " + line;
    fail("deadlock in block (%u, %u, %u):%s", block_index.x, block_index.y, block_index.z, lines.c_str());
}

// The whole kernel that this one overlaps with.
void run_kernel_ahead() {
    const Index grid = grid_size, size = block_size;
    const uint32_t end = shared_end;
    const int blocks = cluster_size;
    const Launch& ahead = *now.launch->ahead;
    {
        std::unique_ptr<SetAside> meetings(set_aside_meetings()), copies(set_aside_copies()), stores(set_aside_stores()),
            matrices(set_aside_matrices());
        Running mine = std::move(now);
        now = {}, now.level = mine.level + 1;
        run_kernel(ahead);
        now = std::move(mine);
        now.fibers = levels[now.level].fibers.data();
    }
    grid_size = grid, block_size = size, shared_end = end, cluster_size = blocks;
    enter_block(0);
    kernel_ahead_is_to_come = 0;
}

void do_late_work(int threads) {
    if (now.late_work.empty()) {
        if (!kernel_ahead_is_to_come) report_deadlock(threads);
        return run_kernel_ahead();
    }
    auto next = now.late_work.begin() + (now.seeded ? random_number(int(now.late_work.size())) : 0);
    auto [work, rank] = *next;
    now.late_work.erase(next);
    enter_block(rank);
    work->run();
    delete work;
}

// Warps by urgency: in random order, or warpgroups in random order.
void put_in_order(std::vector<int>& warps) {
    std::shuffle(warps.begin(), warps.end(), now.generator);
    if (random_number(2)) return;
    std::vector<int> groups((warps.size() + 3) / 4);
    for (size_t i = 0; i < groups.size(); ++i) groups[i] = i;
    std::shuffle(groups.begin(), groups.end(), now.generator);
    std::stable_sort(warps.begin(), warps.end(), [&](int a, int b) { return groups[a / 4] < groups[b / 4]; });
}

// Whether all lanes of a warp wait for the same, or have ended.
bool are_alike(const Fiber* lanes) {
    for (int i = 1; i < 32; ++i)
        if (lanes[i].done != lanes[0].done || lanes[i].wait.word != lanes[0].wait.word ||
            lanes[i].wait.mask != lanes[0].wait.mask || lanes[i].wait.value != lanes[0].wait.value)
            return false;
    return true;
}

// Run the lanes of a warp that can continue, as far as they can for now.
bool run_warp(int warp) {
    const Fiber* lanes = now.fibers + 32 * warp;
    if (now.alike[warp] && (lanes->done || is_blocked(lanes->wait))) return false;
    now.turn = {warp, now.seeded ? random_number(32) : 0, 0};
    int lane = next_lane();
    if (lane >= 0) resume(lane, &now.scheduler);
    now.alike[warp] = are_alike(lanes);
    return lane >= 0;
}

bool is_done(int threads) {
    for (int i = 0; i < threads; ++i)
        if (!now.fibers[i].done) return false;
    return true;
}

// A block, or those of a cluster, which have `threads` together.
void run_blocks(int threads) {
    std::vector<int> warps(threads / 32);
    for (int i = 0; i < threads; ++i) begin_fiber(now.fibers[i], i);
    now.alike.assign(warps.size(), false);
    for (size_t i = 0; i < warps.size(); ++i) warps[i] = i;
    int kept_back = now.launch->kept_back;
    std::stable_partition(warps.begin(), warps.end(), [&](int warp) { return warp / 4 + 1 != kept_back; });
    now.late_work.clear();
    enter_block(0);
    begin_block_meetings(), begin_block_copies(), begin_block_matrices();
    int turns = now.seeded ? 1 << 3 * random_number(4) : 0;  // average duration of an order
    if (now.seeded) put_in_order(warps);
    for (;;) {
        if (now.seeded && random_number(turns) == 0) put_in_order(warps);
        bool ran = false;
        for (int warp : warps) {
            ran |= run_warp(warp);
            if ((now.seeded || kept_back) && ran) break;
        }
        if (!ran && is_done(threads)) return;
        if (!ran || (now.seeded && !now.late_work.empty() && random_number(64) == 0)) do_late_work(threads);
    }
}

void run_kernel(const Launch& launch) {
    int threads = launch.block.x * launch.block.y * launch.block.z;
    if (levels.size() <= now.level) levels.resize(now.level + 1);
    Level& level = levels[now.level];
    cluster_size = launch.cluster ? launch.cluster : 1;
    if (launch.grid.x % cluster_size) fail("%u blocks are not whole clusters of %d", launch.grid.x, cluster_size);
    while (int(level.shared.size()) < cluster_size)
        level.shared.push_back(static_cast<uint8_t*>(aligned_alloc(1024, 2 * MOST_SHARED)));
    now.launch = &launch, now.seeded = launch.seed != 0, now.generator.seed(launch.seed);
    if (threads % 32 || threads > 1024) fail("a block is not of up to 1024 threads in whole warps");
    if (launch.shared_bytes > MOST_SHARED) fail("more shared memory than there is");
    while (int(level.fibers.size()) < threads * cluster_size) level.fibers.push_back({new_stack(), nullptr, {}, true, false, 0, 0, {}});
    now.fibers = level.fibers.data();
    shared_end = DYNAMIC_SHARED_AT + launch.shared_bytes;
    grid_size = launch.grid, block_size = launch.block;
    kernel_ahead_is_to_come = launch.ahead != nullptr;
    for (int i = 0; i < threads * cluster_size; ++i) place_fiber(now.fibers[i], i);
    for (int i = 0; i < cluster_size; ++i) memset(level.shared[i], UNWRITTEN, shared_end + 1024);
    for (unsigned z = 0; z < launch.grid.z; ++z)
        for (unsigned y = 0; y < launch.grid.y; ++y)
            for (unsigned x = 0; x < launch.grid.x; x += cluster_size)
                now.first_block = {x, y, z}, run_blocks(threads * cluster_size);
    for (int rank = 0; rank < cluster_size; ++rank)
        for (uint32_t i = shared_end; i < shared_end + 1024; ++i)
            if (levels[now.level].shared[rank][i] != UNWRITTEN)
                fail("a write %u bytes past the end of shared memory", i - shared_end);
    if (kernel_ahead_is_to_come) run_kernel_ahead();  // which no fiber waited for
}

void on_bad_address(int, siginfo_t* info, void*) { fail("an access at %p, where no array is", info->si_addr); }

}  // namespace

void wait(const Wait& wait) {
    Fiber& fiber = now.fibers[fiber_number];
    fiber.wait = wait;
    while (is_blocked(fiber.wait)) leave(fiber);
    fiber.wait.word = nullptr;
}

void wait_for_kernel_ahead() { wait({&kernel_ahead_is_to_come, ~0ull, 1, "griddepcontrol.wait", 0}); }

void fail(const char* format, ...) {
    char text[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    message = std::string(now.launch->name) + ": " + text;
    longjmp(out, 1);
}

bool work_is_late() { return now.seeded ? random_number(2) : now.launch->late; }
int random_number(int below) { return int(now.generator() % below); }
void when_stuck(Work* work) { now.late_work.push_back({work, cluster_rank}); }

uint32_t without_rank(uint32_t address) {
    int rank = address >> RANK_SHIFT;
    if (rank != cluster_rank) fail("block %d of a cluster takes %#x for its own shared memory", cluster_rank, address);
    return address - (rank << RANK_SHIFT);
}

uint8_t* shared_at(uint32_t address, uint32_t bytes) {
    address = without_rank(address);
    if (address < DYNAMIC_SHARED_AT || address + bytes > shared_end)
        fail("%u bytes at %u of shared memory, which ends at %u", bytes, address, shared_end);
    if (address % bytes) fail("%u bytes at %u of shared memory, which is misaligned", bytes, address);
    return shared_memory + address;
}

uint32_t mapped(uint32_t address, uint32_t rank) {
    if (int(rank) >= cluster_size) fail("shared memory of block %u of a cluster of %d", rank, cluster_size);
    return (address & ((1u << RANK_SHIFT) - 1)) | rank << RANK_SHIFT;  // replaces the rank
}

uint8_t* cluster_shared_at(uint32_t address, uint32_t bytes) {
    int rank = address >> RANK_SHIFT, threads = threads_of_block();
    uint32_t place = address - (rank << RANK_SHIFT);
    uint8_t* own = shared_at(place | cluster_rank << RANK_SHIFT, bytes);
    if (rank == cluster_rank) return own;
    bool begun = false, ended = true;
    for (int i = rank * threads; i < (rank + 1) * threads; ++i) begun |= now.fibers[i].begun, ended &= now.fibers[i].done;
    if (!begun || ended) fail("a write to block %d of the cluster, which %s", rank, begun ? "has ended" : "may not have begun");
    return levels[now.level].shared[rank] + place;
}

namespace {

struct RemoteStore : Work {
    uint32_t address, barrier;
    std::vector<uint32_t> values;

    void run() override {
        int mine = cluster_rank, bytes = 4 * values.size();
        memcpy(cluster_shared_at(address, bytes), values.data(), bytes);
        enter_block(address >> RANK_SHIFT);
        barrier_bytes(barrier, bytes);
        enter_block(mine);
    }
};

}  // namespace

void store_async(uint32_t address, std::initializer_list<uint32_t> values, uint32_t barrier) {
    if (address >> RANK_SHIFT != barrier >> RANK_SHIFT) fail("a store to %#x counts at %#x, of another block", address, barrier);
    auto* store = new RemoteStore;
    store->address = address, store->barrier = barrier, store->values = values;
    cluster_shared_at(address, 4 * values.size());
    if (work_is_late()) return when_stuck(store);
    store->run();
    delete store;
}

// Runs a kernel, and those ahead of it that it may overlap with; returns null or an error message.
extern "C" EXPORT const char* emulator_launch(const Launch* launch) {
    struct sigaction action = {}, segv, bus;
    action.sa_sigaction = on_bad_address, action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &segv), sigaction(SIGBUS, &action, &bus);
    uint32_t float_mode = _mm_getcsr();
    message.clear();
    now = {};
    if (!setjmp(out)) {
        _mm_setcsr(float_mode | 0x8040);  // subnormal numbers are flushed to zero
        run_kernel(*launch);
    }
    _mm_setcsr(float_mode);
    sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
    return message.empty() ? nullptr : message.c_str();
}

}  // namespace emulator
