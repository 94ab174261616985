// What an engine says of itself when it joins, and whether that is what the actor would generate with.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "trainer/config/config.h"
#include "trainer/model/config.h"
#include "trainer/work/wire.h"

namespace trireme {

// Keys of the job's store: the ticket of the work server, the port it listens on, who sends weights, and what an
// engine probes its rewards with before it joins. The ticket comes last.
inline constexpr const char* kWorkTicketKey = "work/ticket";
inline constexpr const char* kWorkPortKey = "work/port";
inline constexpr const char* kActorLayoutKey = "work/layout";  // of the ranks that train, as to_string(Layout)
inline constexpr const char* kRewardProbeKey = "work/probe";   // as to_body(RewardRequest)

// Without name and session.
JoinRequest identity_of(const Config& config, const ModelConfig& model, const std::filesystem::path& model_dir,
                        const std::filesystem::path& hf_home);
// The first thing that is another one than the actor's, by its key or file, as the end of a sentence that begins with
// the engine's name; the actor's is what is "there". Throws Error(kUser) where the engine's configuration is none.
std::optional<std::string> difference_of_engine(const JoinRequest& actor, const Config& config,
                                                const JoinRequest& engine);

}  // namespace trireme
