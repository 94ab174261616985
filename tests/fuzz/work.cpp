// libFuzzer: bytes as what an engine and the work server send each other. What is read is within its bounds and writes
// to what reads as the same; a desk that gets it goes on.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error.h"
#include "trainer/work/desk.h"
#include "trainer/work/wire.h"

namespace {

using namespace trireme;

void expect(bool holds) {
  if (!holds) std::abort();
}

// Null: it was refused, by an error of the data.
template <typename Parse, typename Use>
void read(Parse&& parse, Use&& use) {
  try {
    const auto value = parse();
    use(value);
  } catch (const Error& error) {
    expect(error.kind() == ErrorKind::kData || error.kind() == ErrorKind::kConflict);
  }
}

Desk make_desk() {
  DeskOptions options;
  options.ledger = {.groups_per_step = 1, .samples_per_group = 2, .max_age = 1};
  options.vocabulary = 16;
  options.prompt = [](int64_t, bool) { return WorkPrompt(); };
  Desk desk(options);
  desk.open();
  desk.publish();
  desk.join({"e", "s", "", "", "", 4}, Desk::Time());
  LeaseRequest lease;
  lease.caller = {0, "s", ""};
  lease.places = 2;
  lease.version = lease.fetched = 0;
  expect(desk.lease(lease, Desk::Time()).runs.size() == 1);
  return desk;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto same = [](const auto& value, auto parse) { expect(parse(to_body(value)) == value); };
  read([&] { return parse_probe(bytes); },
       [&](const auto& v) { expect(to_body(parse_probe(to_body(v))) == to_body(v)); });
  read([&] { return parse_join_request(bytes); }, [&](const auto& v) { same(v, parse_join_request); });
  read([&] { return parse_join_reply(bytes); }, [&](const auto& v) { same(v, parse_join_reply); });
  read([&] { return parse_lease_reply(bytes); }, [&](const auto& v) { same(v, parse_lease_reply); });
  read([&] { return parse_groups_reply(bytes); }, [&](const auto& v) { same(v, parse_groups_reply); });
  read([&] { return parse_weights_reply(bytes); }, [&](const auto& v) { same(v, parse_weights_reply); });
  read([&] { return parse_leave_request(bytes); },
       [&](const auto& v) {
         same(v, parse_leave_request);
         Desk desk = make_desk();
         desk.leave(v, Desk::Time());
       });
  read([&] { return parse_lease_request(bytes); },
       [&](const auto& v) {
         same(v, parse_lease_request);
         Desk desk = make_desk();
         (void)desk.lease(v, Desk::Time());
       });
  read([&] { return parse_weights_query(bytes); },
       [&](const auto& v) {
         Desk desk = make_desk();
         (void)desk.weights(v, Desk::Time());
       });
  read([&] { return parse_groups_request(bytes); },
       [&](const auto& v) {
         expect(pack_samples(parse_groups_request(to_body(v)).samples) == pack_samples(v.samples));
         Desk desk = make_desk();
         (void)desk.take_groups(v, Desk::Time());
       });
  return 0;
}
