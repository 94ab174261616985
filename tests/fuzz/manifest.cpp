// Manifest text (YAML and JSON) through parsing, validation and everything derived from an accepted job. No input may
// do more than throw trireme::Error.
#include <cstdint>
#include <string_view>

#include "api/runtime.h"
#include "api/validate.h"
#include "base/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace trireme;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    const Manifest manifest = parse_manifest(text, "fuzz.yaml");
    for (const RLJob& job : manifest.jobs) {
      validate_update(job, manifest.jobs.front());
      const bool valid = validate(job).ok();
      if (rljob_from_json(to_json(job)).metadata.name != job.metadata.name) __builtin_trap();
      if (!valid) continue;
      for (const RoleRef& role : roles_of(job.spec)) {
        role_command(job, role.name, "config.yaml");
        pod_environment(job, {.role = role.name});
        pod_view(job.spec, *role.spec);
      }
      if (world_size(actor_of(job.spec)) <= 64) topology_document(job, 1, {"a", "b"});
    }
  } catch (const Error&) {
  }
  try {
    std::vector<Issue> issues;
    const RLJob job = rljob_from_json(parse_json_bounded(text, "fuzz.json"), issues, {.strict = false});
    validate(job);
    to_json(job).dump();
  } catch (const Error&) {
  }
  return 0;
}
