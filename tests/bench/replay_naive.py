#!/usr/bin/env python3
"""The replays of `tandem bench trace` once more, written from the rules and not from the code, as simply as possible: a request at a time,
plain dictionaries, every victim found by looking at all that is held. Quadratic, so for prefixes of a trace.

    replay_naive.py TRACE [--requests N] [--sizes 1,3,10,30]       prints one JSON object: {policy: [hits at each size]}
    replay_naive.py --make SEED REQUESTS > TRACE                    makes a trace of the same form

The rules: store/policy.h and store/policy_learn.h; S3-FIFO as in its paper; Belady: after each request keep the blocks whose next use is nearest,
of two equal ones the one nearer to the root.
"""
import argparse
import json
import random

FIRST_STAGE_MS, STAGES, KINDS = 4000, 32, 16
PRIOR_BLOCKS, POOL_BLOCKS, FIRST_CHANCE = 50, 10, 0.001
LOSSLESS_SIZE, LOSSY_SIZE = 27, 16  # of a block, where it may be demoted
REFRESH_TOUCHES, HALVE_BLOCKS, GHOSTS_MIN = 16, 131072, 65536
STAGE_ENDS = [(FIRST_STAGE_MS << s // 2) * (181 if s % 2 else 128) // 128 for s in range(STAGES)]
WIDTHS = [STAGE_ENDS[0]] + [b - a for a, b in zip(STAGE_ENDS, STAGE_ENDS[1:])]


def leading_run(chain, held):
    run = 0
    while run < len(chain) and chain[run] in held:
        run += 1
    return run


class Lru:
    def __init__(self, capacity, trace):
        self.capacity, self.held, self.tick = capacity, {}, 0  # id -> tick of its last use

    def request(self, index, time_ms, chain):
        hits = leading_run(chain, self.held)
        for block in reversed(chain):
            self.tick += 1
            self.held[block] = self.tick
        while len(self.held) > self.capacity:
            del self.held[min(self.held, key=self.held.get)]
        return hits


class S3Fifo:
    def __init__(self, capacity, trace):
        self.small_max = max(capacity // 10, 1)
        self.main_max = capacity - self.small_max
        self.small, self.main, self.uses = [], [], {}  # oldest first; uses of what is held
        self.left = []  # every block that left the small queue for good, in order

    def evict_main(self):
        while True:
            block = self.main.pop(0)
            if self.uses[block] == 0:
                del self.uses[block]
                return
            self.uses[block] -= 1
            self.main.append(block)

    def evict_small(self):
        while self.small:
            block = self.small.pop(0)
            if self.uses[block] <= 1:
                del self.uses[block]
                self.left.append(block)
                return
            self.uses[block] = 0
            self.main.append(block)
            while len(self.main) > self.main_max:
                self.evict_main()

    def request(self, index, time_ms, chain):
        hits = leading_run(chain, self.uses)
        for block in chain:
            if block in self.uses:
                self.uses[block] = min(3, self.uses[block] + 1)
                continue
            while len(self.small) + len(self.main) >= self.small_max + self.main_max:
                if len(self.small) >= self.small_max or not self.main:
                    self.evict_small()
                else:
                    self.evict_main()
            ghosts = self.left[-self.main_max:] if self.main_max else []
            self.uses[block] = 0
            (self.main if block in ghosts else self.small).append(block)
        return hits


class Belady:
    def __init__(self, capacity, trace):
        self.capacity, self.held = capacity, set()
        self.trace = [chain for _, chain in trace]
        self.depth = {}

    def next_use(self, block, index):
        for later in range(index + 1, len(self.trace)):
            if block in self.trace[later]:
                return later
        return len(self.trace)

    def request(self, index, time_ms, chain):
        hits = leading_run(chain, self.held)
        self.held.update(chain)
        self.depth.update((block, depth) for depth, block in enumerate(chain))
        if len(self.held) > self.capacity:
            order = sorted(self.held, key=lambda b: (self.next_use(b, index), self.depth[b]))
            self.held = set(order[:self.capacity])
        return hits


class Block:
    def __init__(self, generation, request, parent):
        self.generation, self.request, self.parent = generation, request, parent
        self.uses, self.held, self.stage, self.kind, self.used_ms, self.order = 0, False, 0, 0, 0, 0


class Tandem:
    def __init__(self, capacity, trace):
        self.capacity, self.blocks, self.now, self.requests, self.order = capacity, {}, 0, 0, 0
        self.entered = {}  # (kind, stage) -> blocks; kind None: of all kinds together
        self.used = {}
        self.touches_left, self.blocks_left = REFRESH_TOUCHES, HALVE_BLOCKS
        self.compute_values()

    def chance(self, kind, stage, before, weight):
        return (self.used.get((kind, stage), 0) + weight * before) / (self.entered.get((kind, stage), 0) + weight)

    def compute_values(self):
        pool, before = [], FIRST_CHANCE
        for stage in range(STAGES):
            before = self.chance(None, stage, before, POOL_BLOCKS)
            pool.append(before)
        self.value = []
        for kind in range(KINDS):
            chances = [self.chance(kind, stage, pool[stage], PRIOR_BLOCKS) for stage in range(STAGES)]
            values = []
            for start in range(STAGES):
                unused, used, held_ms, best = 1.0, 0.0, 0.0, 0.0
                for stage in range(start, STAGES):
                    used += unused * chances[stage]
                    held_ms += unused * WIDTHS[stage] * (1 - chances[stage] / 2)
                    unused *= 1 - chances[stage]
                    best = max(best, used / held_ms)
                values.append(best * 1000)
            self.value.append(values)

    def enter(self, block):
        for kind in (None, block.kind):
            self.entered[kind, block.stage] = self.entered.get((kind, block.stage), 0) + 1
        if block.stage == 0:
            self.blocks_left -= 1
            if self.blocks_left == 0:
                self.blocks_left = HALVE_BLOCKS
                for table in (self.entered, self.used):
                    for key in table:
                        table[key] /= 2

    def leaves(self):
        parents = {b.parent for b in self.blocks.values() if b.held}
        return [(name, b) for name, b in self.blocks.items() if b.held and name not in parents]

    def worth(self, block):
        return self.value[block.kind][block.stage]

    def request(self, index, time_ms, chain):
        self.now = max(self.now, time_ms)
        for block in self.blocks.values():
            while block.stage + 1 < STAGES and self.now - block.used_ms >= STAGE_ENDS[block.stage]:
                block.stage += 1
                self.enter(block)
        self.touches_left -= 1
        if self.touches_left == 0:
            self.touches_left = REFRESH_TOUCHES
            self.compute_values()
        hits = leading_run(chain, {name for name in chain if name in self.blocks and self.blocks[name].held})
        self.touch(index, chain)
        self.take_in(chain)
        return hits

    def touch(self, index, chain):
        parent = None
        for depth, name in enumerate(chain):
            if name in self.blocks:
                block = self.blocks[name]
                for kind in (None, block.kind):
                    self.used[kind, block.stage] = self.used.get((kind, block.stage), 0) + 1
            else:
                turn = 0
                if parent is not None:
                    above = self.blocks[parent]
                    turn = min(3, above.generation + (above.request != index))
                block = self.blocks[name] = Block(turn, index, parent)
            block.uses += 1
            block.used_ms, block.stage = self.now, 0
            block.order = self.order + len(chain) - depth
            block.kind = (block.uses > 1) + 2 * block.generation + 8 * (depth + 1 == len(chain))
            self.enter(block)
            parent = name
        self.order += len(chain)
        self.trim()

    def trim(self):
        ghosts = sorted((b.order, name) for name, b in self.blocks.items() if not b.held)
        held = len(self.blocks) - len(ghosts)
        for _, name in ghosts[:max(0, len(ghosts) - max(GHOSTS_MIN, held))]:
            del self.blocks[name]

    def least(self, blocks, worth):
        oldest = {}  # the block of each kind that was used longest ago
        for name, block in blocks:
            if block.kind not in oldest or block.order < oldest[block.kind][1].order:
                oldest[block.kind] = (name, block)
        return min(oldest.values(), key=lambda entry: (worth(entry[1]), entry[1].order))

    def take_in(self, chain):
        parent = None
        for name in chain:
            block = self.blocks[name]
            if not block.held:
                if sum(b.held for b in self.blocks.values()) == self.capacity:
                    other, leaf = self.least(self.leaves(), self.worth)
                    if other == parent or self.worth(leaf) >= self.worth(block):
                        return
                    leaf.held = False
                block.held, block.parent = True, parent
            parent = name


class Demoting(Tandem):
    """Before a block goes every lossless one is made smaller, leaf or not, the least valuable first."""

    def worth(self, block, size=None):
        return super().worth(block) / (size or block.size)

    def size(self):
        return sum(b.size for b in self.blocks.values() if b.held)

    def take_in(self, chain):
        limit, parent = self.capacity * LOSSLESS_SIZE, None
        for name in chain:
            block = self.blocks[name]
            if not block.held:
                while self.size() + LOSSLESS_SIZE > limit:
                    lossless = [(n, b) for n, b in self.blocks.items() if b.held and b.size == LOSSLESS_SIZE]
                    if not lossless:
                        break
                    self.least(lossless, self.worth)[1].size = LOSSY_SIZE
                while self.size() + LOSSY_SIZE > limit:
                    other, leaf = self.least(self.leaves(), self.worth)
                    if other == parent or self.worth(leaf) >= self.worth(block, LOSSY_SIZE):
                        return
                    leaf.held = False
                block.size = LOSSLESS_SIZE if self.size() + LOSSLESS_SIZE <= limit else LOSSY_SIZE
                block.held, block.parent = True, parent
            parent = name


POLICIES = {"tandem": Tandem, "demoting": Demoting, "lru": Lru, "s3fifo": S3Fifo, "belady": Belady}


def read(path, requests):
    with open(path) as lines:
        trace = [json.loads(line) for line in lines]
    return [(r["timestamp"], r["hash_ids"]) for r in trace[:requests]]


def make(seed, requests):
    """Conversations that grow by turns a while apart, with shared system prompts, and documents that are read once."""
    rng = random.Random(seed)
    system = [list(range(n * 10, n * 10 + 1 + n)) for n in range(4)]
    talks, fresh, now = [], 1000, 0
    for _ in range(requests):
        now += rng.choice((0, 400, 900, 3000))
        if talks and rng.random() < 0.6:
            talk = talks.pop(min(int(rng.expovariate(0.2)), len(talks) - 1))
        else:
            talk = list(rng.choice(system)) if rng.random() < 0.8 else []
        grown = rng.choice((1, 2, 3, 5, 24))
        chain = talk + list(range(fresh, fresh + grown))
        fresh += grown
        print(json.dumps({"timestamp": now, "input_length": 512 * len(chain), "output_length": 100, "hash_ids": chain}))
        if grown < 24 and len(chain) < 60:
            talks.insert(0, chain[:-1] if rng.random() < 0.7 else chain)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("trace", nargs="?")
    options.add_argument("--requests", type=int)
    options.add_argument("--sizes", default="1,3,10,30")
    options.add_argument("--make", nargs=2, type=int, metavar=("SEED", "REQUESTS"))
    o = options.parse_args()
    if o.make:
        return make(*o.make)
    trace = read(o.trace, o.requests)
    unique = len({block for _, chain in trace for block in chain})
    hits = {}
    for name, policy in POLICIES.items():
        hits[name] = []
        for size in o.sizes.split(","):
            cache = policy(max(1, int(unique * float(size) / 100)), trace)
            hits[name].append(sum(cache.request(i, t, chain) for i, (t, chain) in enumerate(trace)))
    print(json.dumps(hits))


if __name__ == "__main__":
    main()
