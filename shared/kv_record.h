/* kv_record: the levels of the codec by name, the quality record of a model, and the gate "no visible loss".
 *
 * Whether a lossy level can be seen depends on the model, so it is measured (tandem bench codec) and what was
 * measured is kept beside the model: MODEL.codec.json, JSON, keyed by the model's fingerprint and by the level with its
 * tables. A record holds numbers, not a verdict: the limits are in this file, so a changed limit needs no new measurement.
 *
 *   {"format": "tandem-codec-quality", "version": 1, "fingerprint": 64 hex digits, "tokens": continuation tokens measured,
 *    "texts": how many, "levels": [{"level": name, "codec": enum kv_codec, "table_k": n, "table_v": n, "bits_per_value",
 *    "kl_mean", "kl_p99", "top1", "ppl_change", "ppl_change_low", "ppl_change_high", "encode_gb_s", "decode_gb_s"}]}
 *
 * Members that are not known are ignored. */
#ifndef TANDEM_SHARED_KV_RECORD_H
#define TANDEM_SHARED_KV_RECORD_H
#include "shared/kv_block.h"

/* The gate. A token of English carries some 3 nats under a small model: 0.002 is below a thousandth of it, and
 * below what another rounding of activations does to the same model (tests/bench/RESULTS.md). */
#define KV_GATE_KL_MEAN 0.002 /* nats, mean over tokens */
#define KV_GATE_KL_P99  0.02  /* nats: no rare token pays for the mean */
#define KV_GATE_TOP1    0.985 /* share of tokens whose likeliest one stays */
#define KV_GATE_PPL     0.001 /* relative change of perplexity */
/* and the upper end of its 95 % interval: too few tokens do not pass by chance */
#define KV_GATE_PPL_HIGH   0.003
#define KV_GATE_TOKENS_MIN 2000 /* continuation tokens */
#define KV_GATE_TEXTS_MIN  3
#define KV_RECORD_SIZE_MAX (1u << 20)

struct kv_level {
    const char *name;
    uint8_t codec;    /* enum kv_codec */
    uint8_t table[2]; /* of K, of V */
};
#define KV_LEVELS 6 /* raw, l0, l1, l2, l2-k5, l2-5bit */
extern const struct kv_level KV_LEVEL_LIST[KV_LEVELS];
#define KV_LEVEL_NAMES "raw, l0, l1, l2, l2-k5 or l2-5bit"
const struct kv_level *kv_level_find(const char *name); /* NULL: none */
/* The table of a piece at this level. At L1 the block that holds the sequence's first token has a scale for 64 values
 * whatever the level's tables are: that token's V is small and every later token looks at it, so it must not share
 * its neighbour's scale. Mean divergence of L1 on SmolLM2-135M: 0.00012, without this 0.00044. */
uint8_t kv_level_table(const struct kv_level *level, uint8_t is_value, uint32_t block_index);

struct kv_level_quality {
    bool known;
    double bits_per_value, encode_gb_s, decode_gb_s; /* a core; GB/s of f16 */
    double kl_mean, kl_p99, top1;
    double ppl_change, ppl_change_low, ppl_change_high; /* 0.001: 0.1 % worse; 95 % interval */
};

struct kv_record {
    uint8_t fingerprint[TD_HASH_SIZE];
    uint64_t token_count;
    uint32_t text_count;
    struct kv_level_quality levels[KV_LEVELS]; /* by place in KV_LEVEL_LIST */
};

/* "MODEL.codec.json"; -TD_ERR_NOSPACE. */
int kv_record_path(const char *model_path, char *out, size_t size);
int kv_record_save(const struct kv_record *r, const char *path, struct td_error *err);
/* -TD_ERR_NOTFOUND: no such file. -TD_ERR_MISMATCH: of another model. -TD_ERR_FORMAT, -TD_ERR_IO. */
int kv_record_load(struct kv_record *r, const char *path, const uint8_t fingerprint[TD_HASH_SIZE],
                   struct td_error *err);

/* Does the level show no loss? NULL: yes; else what is wrong, static text. */
const char *kv_gate(const struct kv_record *r, const struct kv_level *level);

/* May a program use the level with this model? Lossless levels: always. L1: unless the model's record says that it fails.
 * Lossier ones need a record and must pass. -TD_ERR_BLOCKED with a line that says what to do. */
int kv_level_allowed(const struct kv_level *level, const char *model_path,
                     const uint8_t fingerprint[TD_HASH_SIZE], struct td_error *err);
/* The smallest that a program may use. Returns 0, or what a record that cannot be read gives. */
int kv_level_choose(const char *model_path, const uint8_t fingerprint[TD_HASH_SIZE],
                    const struct kv_level **out, struct td_error *err);

#endif
