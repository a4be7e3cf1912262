// Collective operations of threads.
#include "emulator.h"
#include <memory>
#include <unordered_map>
#include <vector>

namespace emulator {
namespace {

constexpr int MOST_WARPS = 32, LANES = 32;

// A warp's meeting point. Inputs and results of lanes are kept until the meeting after the next: by then all have read them.
struct Warp {
    uint64_t meetings;
    int arrived;
    const char* what;
    uint32_t votes[2];
    uint64_t words[2][LANES];
    alignas(64) uint8_t brought[2][LANES][MOST_BYTES], taken[2][LANES][MOST_BYTES];

    int place() const { return meetings & 1; }
    // Before a lane brings anything: lanes meet for the same.
    void begin(const char* what_) {
        if (arrived == 0) what = what_;
        else if (what != what_ && strcmp(what, what_))
            fail("lanes of warp %d meet at %s and at %s", thread_number / LANES, what, what_);
    }
    // Return when all have come.
    void end() {
        if (++arrived == LANES) {
            arrived = 0, ++meetings;
            return;
        }
        wait({&meetings, ~0ull, meetings, what, 0});
    }
};
// Counts arrivals, and completed phases.
struct Gate {
    int arrived = 0;
    uint64_t times = 0;

    bool arrive(int threads) {
        if (++arrived < threads) return false;
        arrived = 0, ++times;
        return true;
    }
    void pass(int threads, const char* what, uint64_t number) {
        uint64_t now = times;
        if (!arrive(threads)) wait({&times, ~0ull, now, what, number});
    }
};
struct Barrier {
    int expected, pending;
    uint64_t phase = 0;
    int64_t bytes = 0;  // still expected, in addition to the arrivals

    void arrive(int count) {
        pending -= count;
        if (!pending && !bytes) pending = expected, ++phase;
    }
};

struct Block {
    Warp warps[MOST_WARPS];
    Gate everybody;
    int vote = 0;
    std::unordered_map<int, Gate> named;
    std::unordered_map<int, int> named_votes;
    std::unordered_map<uint32_t, Barrier> barriers;
};
struct Cluster {
    std::vector<std::unique_ptr<Block>> blocks;  // on the heap: fibers wait for words inside
    int arrived = 0;
    uint64_t times = 0;
    std::vector<uint64_t> arrivals;  // of each thread
};
std::unique_ptr<Cluster> cluster;

Block* block() { return cluster->blocks[cluster_rank].get(); }
Warp& own_warp() { return block()->warps[thread_number / LANES]; }

Barrier& barrier_at(uint32_t address) {
    auto found = block()->barriers.find(without_rank(address));
    if (found == block()->barriers.end()) fail("there is no mbarrier at %u of shared memory", address);
    return found->second;
}

int threads_of_block() { return block_size.x * block_size.y * block_size.z; }

}  // namespace

void begin_block_meetings() {
    if (!cluster) cluster = std::make_unique<Cluster>();
    cluster->arrived = 0, cluster->times = 0;
    cluster->arrivals.assign(cluster_size * threads_of_block(), 0);
    while (int(cluster->blocks.size()) < cluster_size) cluster->blocks.push_back(std::make_unique<Block>());
    for (auto& block : cluster->blocks) {
        for (Warp& warp : block->warps) warp.meetings = 0, warp.arrived = 0;
        block->everybody = {}, block->vote = 0;
        block->named.clear(), block->named_votes.clear(), block->barriers.clear();
    }
}

SetAside* set_aside_meetings() { return new Kept(cluster); }

void cluster_arrive() {
    ++cluster->arrivals[fiber_number];
    if (++cluster->arrived == int(cluster->arrivals.size())) cluster->arrived = 0, ++cluster->times;
}

void cluster_wait() {
    uint64_t mine = cluster->arrivals[fiber_number];
    if (!mine) fail("barrier.cluster.wait before an arrival");
    wait({&cluster->times, ~0ull, mine - 1, "barrier.cluster", 0});
}

const uint8_t* meet(const char* what, const void* brought, size_t bytes, Act act, void* context) {
    Warp& warp = own_warp();
    int lane = thread_number % LANES, place = warp.place();
    warp.begin(what);
    memcpy(warp.brought[place][lane], brought, bytes);
    memcpy(warp.taken[place][lane], brought, bytes);  // kept if `act` does not change it
    if (warp.arrived == LANES - 1) act(context, warp.brought[place], warp.taken[place]);
    warp.end();
    return warp.taken[place][lane];
}

const uint64_t* exchange(const char* what, uint64_t word) {
    Warp& warp = own_warp();
    int place = warp.place();
    warp.begin(what);
    warp.words[place][thread_number % LANES] = word;
    warp.end();
    return warp.words[place];
}

uint32_t ballot(bool vote) {
    Warp& warp = own_warp();
    int place = warp.place();
    warp.begin("vote.sync");
    if (warp.arrived == 0) warp.votes[place] = 0;
    warp.votes[place] |= uint32_t(vote) << thread_number % LANES;
    warp.end();
    return warp.votes[place];
}

void block_sync() { block()->everybody.pass(threads_of_block(), "__syncthreads", 0); }

int block_sync_or(int predicate) {
    block()->vote |= predicate;
    block_sync();
    int result = block()->vote;
    block_sync();
    block()->vote = 0;
    block_sync();  // before the next vote
    return result;
}

void named_sync(int id, int threads) { block()->named[id].pass(threads, "bar.sync", id); }
void named_arrive(int id, int threads) { block()->named[id].arrive(threads); }

int named_sync_or(int id, int threads, int predicate) {
    int& vote = block()->named_votes[id];
    vote |= predicate;
    named_sync(id, threads);
    int result = vote;
    named_sync(id, threads);
    vote = 0;
    named_sync(id, threads);
    return result;
}

void barrier_init(uint32_t barrier, int arrivals) {
    shared_at(barrier, 8);
    block()->barriers[without_rank(barrier)] = {arrivals, arrivals};
}

void barrier_arrive(uint32_t barrier, int count) {
    Barrier& at = barrier_at(barrier);
    if (at.pending < count) fail("mbarrier at %u: more arrivals than the %d that it expects", barrier, at.expected);
    at.arrive(count);
}

void barrier_expect(uint32_t barrier, uint32_t bytes) { barrier_at(barrier).bytes += bytes; }

void barrier_bytes(uint32_t barrier, uint32_t bytes) {
    Barrier& at = barrier_at(barrier);
    at.bytes -= bytes;
    at.arrive(0);
}

bool barrier_passed(uint32_t barrier, uint32_t parity) { return (barrier_at(barrier).phase & 1) != parity; }

void barrier_wait(uint32_t barrier, uint32_t parity) {
    wait({&barrier_at(barrier).phase, 1, parity, "mbarrier", barrier});
}

}  // namespace emulator
