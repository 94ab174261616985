// The model of the checkpoints' tests.
#pragma once

#include "trainer/model/model.h"

namespace trireme {

inline ModelConfig tiny(int64_t hidden = 16) {
  return ModelConfig::from_json({{"model_type", "qwen3"},
                                 {"architectures", {"Qwen3ForCausalLM"}},
                                 {"vocab_size", 50},
                                 {"hidden_size", hidden},
                                 {"intermediate_size", 24},
                                 {"num_hidden_layers", 1},
                                 {"num_attention_heads", 2},
                                 {"num_key_value_heads", 1},
                                 {"head_dim", 8},
                                 {"hidden_act", "silu"},
                                 {"rms_norm_eps", 1e-6},
                                 {"rope_theta", 10000.0},
                                 {"max_position_embeddings", 64},
                                 {"tie_word_embeddings", true}},
                                "test");
}

}  // namespace trireme
