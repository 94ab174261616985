// The local Hugging Face cache: which folder an id stands for. Internal to trainer/config.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

namespace trireme::config {

// "org/name" or "name": letters, digits, '-', '_', '.'; not something that looks like a path.
bool is_hub_id(const std::string& name);

// The snapshot of `kind` ("models" or "datasets") that refs/main names, else the only one.
std::optional<std::filesystem::path> snapshot(const std::string& kind, const std::string& id,
                                              const std::filesystem::path& hf_home);

// What a person types to have it.
std::string download_command(const std::string& id, bool dataset);

}  // namespace trireme::config
