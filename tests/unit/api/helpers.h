// Shared by the tests of api/: the examples of the repository, and a valid job to break.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "api/rljob.h"
#include "base/error.h"
#include "base/fs.h"
#include "tests/unit/errors.h"

namespace trireme::test {

inline std::filesystem::path source_dir() {
  const char* set = std::getenv("TRIREME_SOURCE_DIR");
  return set ? std::filesystem::path(set) : std::filesystem::current_path();
}

inline std::string read_example(const std::string& name) { return read_file(source_dir() / "examples" / name); }

// The lines of `extra` go under "spec:"; "roles:" and "config:" are there unless extra has them.
inline std::string job_yaml(const std::string& extra = "", const std::string& name = "job") {
  std::string text = "apiVersion: trireme.dev/v1alpha1\nkind: RLJob\nmetadata:\n  name: " + name + "\nspec:\n";
  if (extra.find("config:") == std::string::npos) text += "  config: {path: configs/quickstart.yaml}\n";
  if (extra.find("roles:") == std::string::npos) text += "  roles: {actor: {replicas: 2, gpusPerPod: 8}}\n";
  return text + extra;
}

inline std::string parse_error(const std::string& yaml) {
  return user_error_of([&] { parse_manifest(yaml, "f.yaml"); });
}

}  // namespace trireme::test
