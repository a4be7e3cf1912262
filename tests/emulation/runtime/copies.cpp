// cp.async: a late copy is there when its thread waits for it and not before.
#include "emulator.h"
#include <deque>
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
    std::deque<Group> groups;
};
std::vector<Thread> copying;

void run(const Group& group) {
    for (const Copy& copy : group) copy.run();
}

// The arrival of a thread's copies at a barrier, which may come at any time after.
struct Arrival : Work {
    std::vector<Group> groups;
    uint32_t barrier;

    void run() override {
        for (const Group& group : groups) emulator::run(group);
        barrier_arrive(barrier, 1);
    }
};

}  // namespace

void begin_block_copies() { copying.assign(block_size.x * block_size.y * block_size.z, {}); }

void copy_async(uint32_t target, const void* source, int bytes, int present_bytes) {
    Copy copy{shared_at(target, bytes), source, bytes, present_bytes};
    if (uintptr_t(source) % bytes) fail("cp.async of %d bytes from %p, which is misaligned", bytes, source);
    if (work_is_late()) copying[thread_number].open.push_back(copy);
    else copy.run();
}

void copies_commit() {
    Thread& thread = copying[thread_number];
    thread.groups.push_back(std::move(thread.open));
    thread.open.clear();
}

void copies_wait(uint32_t pending) {
    Thread& thread = copying[thread_number];
    for (; thread.groups.size() > pending; thread.groups.pop_front()) run(thread.groups.front());
}

void copies_arrive(uint32_t barrier) {
    if (!work_is_late()) {
        copies_commit(), copies_wait(0);
        return barrier_arrive(barrier, 1);
    }
    Thread& thread = copying[thread_number];
    auto* arrival = new Arrival;
    arrival->barrier = barrier;
    arrival->groups.assign(thread.groups.begin(), thread.groups.end());
    arrival->groups.push_back(std::move(thread.open));
    thread.groups.clear(), thread.open.clear();
    when_stuck(arrival);
}

}  // namespace emulator
