// Whether a run can fit into its devices, before anything is loaded.
#pragma once

#include <cstdint>
#include <filesystem>

#include "trainer/config/config.h"
#include "trainer/model/config.h"

namespace trireme {

// By the formula of `trireme plan` for the configuration's layout, devices of `device_bytes` each (of a CPU: what a
// rank may have of the host's). Throws Error(kUser) that says how much it wants at the least, and which layout of as
// many ranks wants least, where it cannot be whatever the formula's error is; warns, where `main`, in between.
void check_fits(const Config& config, const ModelConfig& model, const std::filesystem::path& dir, const Layout& layout,
                int64_t device_bytes, bool main);

}  // namespace trireme
