// cp.async: a late copy completes only when its thread waits for it. Copies of boxes complete at any time.
#include "emulator.h"
#include <algorithm>
#include <vector>

namespace emulator {
namespace {

struct Copy {
    uint8_t* target;
    const void* source;
    int bytes, present_bytes;

    void run() const {
        if (present_bytes) memcpy(target, source, present_bytes);
        memset(target + present_bytes, 0, bytes - present_bytes);
    }
};
using Group = std::vector<Copy>;

struct Thread {
    Group open;
    std::vector<Group> groups;
};
std::vector<Thread> copying, storing;  // into shared memory, and bulk copies out of it

void run(const Group& group) {
    for (const Copy& copy : group) copy.run();
}

// The arrival of a thread's copies at a barrier, at any later time.
struct Arrival : Work {
    std::vector<Group> groups;
    uint32_t barrier;

    void run() override {
        for (const Group& group : groups) emulator::run(group);
        barrier_arrive(barrier, 1);
    }
};

// A tensor map as the fake driver encodes it (tests/emulation/cupy.py): bytes, sizes in elements, and the box.
struct Map {
    const uint8_t* start;
    uint64_t element_bytes, size[3], stride[2], box[3];
};

struct Box : Work {
    Map map;
    uint32_t target, barrier;
    int at[3];

    // Rows of 128 bytes, swizzled by the address in shared memory; zeros past the end of the array.
    void run() override {
        for (uint64_t row = 0; row < map.box[1]; ++row) {
            uint64_t y = at[1] + row, z = at[2];
            int64_t start = at[0] * int64_t(map.element_bytes), end = map.size[0] * map.element_bytes;
            if (y >= map.size[1] || z >= map.size[2]) end = 0;
            const uint8_t* from = map.start + y * map.stride[0] + z * map.stride[1];
            for (int i = 0; i < 128; i += 16) {
                uint32_t to = target + row * 128 + i;
                uint8_t* chunk = shared_at(to ^ (to >> 7 & 7) << 4, 16);
                int64_t first = std::max<int64_t>(start + i, 0), last = std::min(start + i + 16, end);
                if (last - first < 16) memset(chunk, 0, 16);
                if (first < last) memcpy(chunk + (first - start - i), from + first, last - first);
            }
        }
        barrier_bytes(barrier, map.box[1] * 128);
    }
};

// A copy of contiguous bytes.
struct Bytes : Work {
    uint8_t* target;
    const void* source;
    uint32_t bytes, barrier;

    void run() override {
        memcpy(target, source, bytes);
        barrier_bytes(barrier, bytes);
    }
};

}  // namespace

void copy_bytes(uint32_t target, const void* source, uint32_t bytes, uint32_t barrier) {
    if (target % 16 || uintptr_t(source) % 16 || bytes % 16)
        fail("cp.async.bulk of %u bytes from %p to %u, where all have to be multiples of 16", bytes, source, target);
    auto* work = new Bytes;
    work->target = shared_at(target, 16), shared_at(target + bytes - 16, 16);
    work->source = source, work->bytes = bytes, work->barrier = barrier;
    if (work_is_late()) return when_stuck(work);
    work->run();
    delete work;
}

void copy_box(uint32_t target, const void* map, int x, int y, int z, uint32_t barrier) {
    auto* box = new Box;
    memcpy(&box->map, map, sizeof box->map);
    box->target = target, box->barrier = barrier, box->at[0] = x, box->at[1] = y, box->at[2] = z;
    if (target % 1024) fail("a box to %u of shared memory, where the swizzle does not begin", target);
    if (uintptr_t(map) % 64) fail("a tensor map at %p, which is misaligned", map);
    if (work_is_late()) return when_stuck(box);
    box->run();
    delete box;
}

void begin_block_copies() {
    copying.assign(cluster_size * block_size.x * block_size.y * block_size.z, {});
    storing = copying;
}

SetAside* set_aside_copies() { return new Kept(copying); }
SetAside* set_aside_stores() { return new Kept(storing); }

void copy_async(uint32_t target, const void* source, int bytes, int present_bytes) {
    Copy copy{shared_at(target, bytes), source, bytes, present_bytes};
    if (uintptr_t(source) % bytes) fail("cp.async of %d bytes from %p, which is misaligned", bytes, source);
    if (work_is_late()) copying[fiber_number].open.push_back(copy);
    else copy.run();
}

static void commit(Thread& thread) {
    thread.groups.push_back(std::move(thread.open));
    thread.open.clear();
}

static void wait(Thread& thread, uint32_t pending) {
    if (thread.groups.size() <= pending) return;
    auto end = thread.groups.end() - pending;
    for (auto group = thread.groups.begin(); group < end; ++group) run(*group);
    thread.groups.erase(thread.groups.begin(), end);
}

void copies_commit() { commit(copying[fiber_number]); }
void copies_wait(uint32_t pending) { wait(copying[fiber_number], pending); }

// A late bulk copy reads shared memory when its thread waits for it.
void store_bytes(void* target, uint32_t source, uint32_t bytes) {
    if (uintptr_t(target) % 16 || source % 16 || bytes % 16)
        fail("cp.async.bulk of %u bytes from %u to %p, where all have to be multiples of 16", bytes, source, target);
    Copy copy{static_cast<uint8_t*>(target), shared_at(source, 16), int(bytes), int(bytes)};
    shared_at(source + bytes - 16, 16);
    if (work_is_late()) storing[fiber_number].open.push_back(copy);
    else copy.run();
}
void stores_commit() { commit(storing[fiber_number]); }
void stores_wait(uint32_t pending) { wait(storing[fiber_number], pending); }

void copies_arrive(uint32_t barrier) {
    if (!work_is_late()) {
        copies_commit(), copies_wait(0);
        return barrier_arrive(barrier, 1);
    }
    Thread& thread = copying[fiber_number];
    auto* arrival = new Arrival;
    arrival->barrier = barrier;
    arrival->groups.assign(thread.groups.begin(), thread.groups.end());
    arrival->groups.push_back(std::move(thread.open));
    thread.groups.clear(), thread.open.clear();
    when_stuck(arrival);
}

}  // namespace emulator
