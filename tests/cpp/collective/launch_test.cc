#include "collective/launch.h"

#include <gtest/gtest.h>

#include <memory>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "collective/fingerprint.h"

namespace jaxfabric {
namespace {

// Asks until the base has settled.
constexpr uint64_t kGroup = 5;

int32_t Settled(LaunchClock& clock, int64_t run_id, uint64_t serial = 2) {
  const Deadline deadline = Deadline::AfterSeconds(20);
  while (!deadline.expired()) {
    if (const auto launch = clock.Launch(run_id, kGroup, serial)) return *launch;
    std::this_thread::yield();
  }
  ADD_FAILURE() << "never settled";
  return -1;
}

TEST(LaunchClockTest, CountsFromTheSmallestRunIdOfTheFirstMoments) {
  LaunchClock clock;
  EXPECT_EQ(clock.Launch(102, kGroup, 2), std::nullopt);
  EXPECT_EQ(clock.Launch(100, kGroup, 2), std::nullopt);
  EXPECT_EQ(clock.Launch(101, kGroup, 2), std::nullopt);
  EXPECT_EQ(Settled(clock, 102), 2);
  EXPECT_EQ(clock.Launch(100, kGroup, 2), 0);
  EXPECT_EQ(clock.Launch(101, kGroup, 2), 1);
  // Too late: it says so instead of giving a number that other ranks have given to another.
  EXPECT_EQ(clock.Launch(99, kGroup, 2), -1);
}

// Another group may have been in a branch without a collective until now.
TEST(LaunchClockTest, CountsForEachGroupFromItsOwnBeginning) {
  LaunchClock clock;
  clock.Launch(100, kGroup, 2);
  EXPECT_EQ(Settled(clock, 100), 0);
  EXPECT_EQ(clock.Launch(103, kGroup, 2), 3);
  constexpr uint64_t kOther = 6;
  const Deadline deadline = Deadline::AfterSeconds(20);
  std::optional<int32_t> launch;
  while (!launch && !deadline.expired()) launch = clock.Launch(103, kOther, 2);
  EXPECT_EQ(launch, 0);
  EXPECT_EQ(clock.Launch(104, kOther, 2), 1);
  EXPECT_EQ(clock.Launch(104, kGroup, 2), 4);
}

TEST(LaunchClockTest, WrapsAt32Bits) {
  LaunchClock clock;
  clock.Launch(0x7fffffff, kGroup, 2);
  EXPECT_EQ(Settled(clock, 0x7fffffff), 0);
  EXPECT_EQ(clock.Launch(-2147483648LL, kGroup, 2), 1);
  EXPECT_EQ(clock.Launch(0x80000001LL, kGroup, 2), 2);
}

TEST(LaunchClockTest, ExecutablesThatShareAClockAreToldApart) {
  LaunchClock clock;
  clock.Launch(1000, kGroup, 2);
  clock.Launch(-1286644329, kGroup, 2);
  EXPECT_EQ(Settled(clock, 1001), 1);
  EXPECT_EQ(Settled(clock, -1286644326), 3);
}

TEST(LaunchClockTest, EveryFabricCountsAnew) {
  LaunchClock clock;
  clock.Launch(10, kGroup, 2);
  EXPECT_EQ(Settled(clock, 15), 5);
  EXPECT_EQ(clock.Launch(16, kGroup, 3), std::nullopt);
  EXPECT_EQ(Settled(clock, 17, 3), 1);
  // An execution of the fabric before.
  EXPECT_EQ(clock.Launch(18, kGroup, 2), std::nullopt);
}

// Values that jaxlib 0.10.2 and 0.12 gave for real executables.
TEST(FingerprintTest, IsFarmHash) {
  const auto low = [](std::string_view text) {
    return static_cast<int32_t>(FarmFingerprint(text).value());
  };
  EXPECT_EQ(low("105784606018040655463684838126954483257"), -1286644329);
  EXPECT_EQ(low("1712077883756389331911999993196362636809"), 1670906983);
  EXPECT_EQ(low("198058067021807048915973584157283035621"), -1461041422);
  EXPECT_EQ(low(""), 0x2f90404f);
  EXPECT_EQ(FarmFingerprint("too short"), std::nullopt);
  EXPECT_EQ(FarmFingerprint(std::string(65, '1')), std::nullopt);
}

// Differences between the hash above and the first run ids of real executables.
TEST(FingerprintTest, OfDevicesIsHighwayHash) {
  const auto low = [](std::vector<int64_t> devices) {
    return static_cast<uint32_t>(DeviceListFingerprint(devices));
  };
  EXPECT_EQ(low({0, 2048}), 0x41665b49u);
  EXPECT_EQ(low({2048, 0}), 0xaf3c66b5u);
  EXPECT_EQ(low({0, 2, 2048, 2050}), 0xdb7418bcu);
  // The digits of more and more devices fill 16 bytes, and 32.
  EXPECT_EQ(low({0, 1, 2, 3, 2048, 2049, 2050, 2051}), 0xebd6144eu);
  EXPECT_EQ(low({2051, 2050, 2049, 2048, 3, 2, 1, 0}), 0x9896a101u);
  EXPECT_EQ(low({0, 1, 2, 3, 4, 5, 6, 7, 2048, 2049, 2050, 2051, 2052, 2053, 2054, 2055}),
            0x3f40a405u);
}

// The clock of an executable that has been compiled.
std::shared_ptr<LaunchClock> Compile(std::string_view fingerprint,
                                     std::vector<int64_t> devices = {}) {
  SiteRegistry& registry = SiteRegistry::Get();
  const uint64_t begun = registry.BeginCompilation();
  auto clock = registry.Add(88001).clock;
  registry.EndCompilation(begun, fingerprint, devices);
  return clock;
}

TEST(FingerprintTest, WithDevicesOfOtherProcesses) {
  constexpr std::string_view kFingerprint = "117412479949259798127005919985376715684";
  constexpr auto kAlone = static_cast<int32_t>(0x8641f885);
  constexpr auto kForward = static_cast<int32_t>(0xc7a853ce);
  constexpr auto kBackward = static_cast<int32_t>(0x8641f885u + 0xaf3c66b5u);
  const std::tuple<std::vector<int64_t>, int32_t, uint32_t> cases[] = {
      {{}, kAlone, 0}, {{0, 2048}, kForward, 0x41665b49}, {{2048, 0}, kBackward, 0xaf3c66b5}};
  for (const auto& [devices, first, hash] : cases) {
    const auto clock = Compile(kFingerprint, devices);
    EXPECT_EQ(clock->FirstRunId(first + 1, 1), static_cast<uint32_t>(first));
    EXPECT_EQ(clock->FirstRunId(first, 1), static_cast<uint32_t>(first));
    EXPECT_EQ(clock->DevicesOf(first), hash);
  }
}

TEST(FingerprintTest, MakesTheFirstLaunchKnownAtOnce) {
  const auto clock = Compile("105784606018040655463684838126954483257");
  constexpr int32_t kFirst = -1286644329;
  EXPECT_EQ(clock->FirstRunId(kFirst + 2, 1), static_cast<uint32_t>(kFirst));
  EXPECT_EQ(clock->FirstRunId(kFirst, 1), static_cast<uint32_t>(kFirst));
  EXPECT_EQ(clock->FirstRunId(kFirst - 1, 1), std::nullopt);
  // Later fabrics count from where they begin.
  EXPECT_EQ(clock->FirstRunId(kFirst + 2, 2), std::nullopt);
}

TEST(FingerprintTest, IsNeverTakenForThatOfAnotherExecutable) {
  const auto known = Compile("105784606018040655463684838126954483261");
  const auto first =
      static_cast<int32_t>(*FarmFingerprint("105784606018040655463684838126954483261"));
  ASSERT_EQ(known->DevicesOf(first), 0u);
  // Nobody has told of this one. Its run ids happen to be near.
  SiteRegistry& registry = SiteRegistry::Get();
  const auto unknown = registry.Add(88002).clock;
  registry.CloseExecutable(unknown.get());
  // This one failed, and this one has no fingerprint that can be hashed.
  const uint64_t begun = registry.BeginCompilation();
  const auto failed = registry.Add(88002).clock;
  registry.EndCompilation(begun, std::nullopt, {});
  const auto odd = Compile("1057846060");
  for (const auto& clock : {unknown, failed, odd}) {
    EXPECT_EQ(clock->DevicesOf(first + 10), std::nullopt);
    EXPECT_EQ(clock->FirstRunId(first + 10, 1), std::nullopt);
  }
}

TEST(FingerprintTest, OfProgramsThatThreadsCompileAtOnce) {
  SiteRegistry& registry = SiteRegistry::Get();
  constexpr std::string_view kEarly = "105784606018040655463684838126954483262";
  constexpr std::string_view kLate = "105784606018040655463684838126954483263";
  const uint64_t early = registry.BeginCompilation();
  const auto before = registry.Add(88003).clock;
  const uint64_t late = registry.BeginCompilation();
  const auto between = registry.Add(88004).clock;
  registry.EndCompilation(early, kEarly, {});
  const auto after = registry.Add(88004).clock;
  registry.EndCompilation(late, kLate, {});
  const auto next = registry.Add(88005).clock;
  registry.CloseExecutable(next.get());

  const uint32_t first = static_cast<uint32_t>(*FarmFingerprint(kEarly));
  const uint32_t second = static_cast<uint32_t>(*FarmFingerprint(kLate));
  EXPECT_EQ(before->FirstRunId(first + 3, 1), first);
  EXPECT_EQ(between->FirstRunId(second + 3, 1), second);
  EXPECT_EQ(after->FirstRunId(second, 1), second);
  EXPECT_EQ(next->FirstRunId(second, 1), std::nullopt);
}

TEST(SharedRunIdsTest, GivesEachExecutableNumbersOfItsOwn) {
  constexpr uint32_t kBase = 0xfffffffe;  // and wraps
  // The second of them was made when three of the first's had entered.
  SharedRunIds ids(kBase, kBase + 3, 2);
  const auto claim = [&](uint32_t index, uint64_t executable, uint64_t fabric_serial) {
    ids.Claim(kBase + index, executable, executable == 2 ? 3 : 0, fabric_serial);
  };
  const auto own = [&](uint32_t index) -> std::optional<uint32_t> {
    const auto run_id = ids.Own(kBase + index);
    if (!run_id) return std::nullopt;
    return *run_id - kBase;
  };
  for (uint32_t index : {0, 1, 2}) EXPECT_EQ(own(index), index);
  EXPECT_EQ(own(3), std::nullopt);
  // In any order, and more than once.
  claim(5, 2, 1);
  claim(4, 1, 1);
  EXPECT_EQ(own(4), std::nullopt);
  EXPECT_EQ(own(5), std::nullopt);
  for (int i = 0; i < 2; ++i) {
    claim(3, 2, 1);
    EXPECT_EQ(own(3), 3u);
    EXPECT_EQ(own(4), 3u);
    EXPECT_EQ(own(5), 4u);
  }
  claim(6, 1, 1);
  EXPECT_EQ(own(6), 4u);
  // A failure has kept 7 from entering; 9 enters in the fabric after it.
  claim(8, 2, 1);
  EXPECT_EQ(own(8), std::nullopt);
  claim(9, 1, 2);
  EXPECT_EQ(own(8), 5u);
  EXPECT_EQ(own(9), 5u);
  claim(11, 1, 2);
  EXPECT_EQ(own(11), std::nullopt);
  claim(10, 2, 2);
  EXPECT_EQ(own(11), 6u);
}

TEST(SharedRunIdsTest, KnowsLaunchesFromBeforeTheSecondExecutable) {
  // As long as those of XLA.
  constexpr std::string_view kFingerprint = "105784606018040655463684838126954483258";
  const auto first = Compile(kFingerprint);
  const auto base = static_cast<int32_t>(*FarmFingerprint(kFingerprint));
  for (int i : {0, 2, 1}) first->Enter(base + i, 1);
  EXPECT_EQ(first->OwnRunId(base + 2), base + 2);
  const auto second = Compile(kFingerprint);
  EXPECT_EQ(first->OwnRunId(base + 2), base + 2);
  second->Enter(base + 4, 1);
  EXPECT_EQ(second->OwnRunId(base + 4), std::nullopt);
  first->Enter(base + 3, 1);
  EXPECT_EQ(second->OwnRunId(base + 4), base + 3);
  EXPECT_EQ(second->FirstRunId(base + 3, 1), static_cast<uint32_t>(base + 3));
  EXPECT_EQ(first->OwnRunId(base + 3), base + 3);
  first->Enter(base + 5, 1);
  EXPECT_EQ(first->OwnRunId(base + 5), base + 4);
  // Of other executables all are their own.
  EXPECT_EQ(first->OwnRunId(base + (1 << 28)), base + (1 << 28));
}

// On one rank an equal executable lives, on another it is gone: both give the same numbers.
TEST(SharedRunIdsTest, AreTheSameWhetherTheFirstExecutableLivesOrNot) {
  constexpr std::string_view kFingerprints[] = {"105784606018040655463684838126954483264",
                                                "105784606018040655463684838126954483265"};
  for (std::string_view fingerprint : kFingerprints) {
    const bool lives = fingerprint == kFingerprints[0];
    auto first = Compile(fingerprint);
    const auto base = static_cast<int32_t>(*FarmFingerprint(fingerprint));
    for (int i : {0, 1, 2}) first->Enter(base + i, 1);
    if (!lives) first.reset();
    const auto second = Compile(fingerprint);
    for (int i : {4, 3}) second->Enter(base + i, 1);
    EXPECT_EQ(second->FirstRunId(base + 3, 1), static_cast<uint32_t>(base + 3));
    EXPECT_EQ(second->OwnRunId(base + 3), base + 3);
    EXPECT_EQ(second->OwnRunId(base + 4), base + 4);
  }
}

TEST(SharedRunIdsTest, AreKnownOfExecutablesThatWereCompiledBesideOthers) {
  SiteRegistry& registry = SiteRegistry::Get();
  constexpr std::string_view kGone = "105784606018040655463684838126954483266";
  constexpr std::string_view kStays = "105784606018040655463684838126954483267";
  const auto base = static_cast<int32_t>(*FarmFingerprint(kGone));
  const uint64_t begun = registry.BeginCompilation();
  auto gone = registry.Add(88006).clock;
  const auto stays = Compile(kStays);  // may be the other one too, for all that is known
  registry.EndCompilation(begun, kGone, {});
  ASSERT_EQ(stays->FirstRunId(base, 1), static_cast<uint32_t>(base));
  for (int i : {0, 1, 2}) gone->Enter(base + i, 1);
  stays->Enter(static_cast<int32_t>(*FarmFingerprint(kStays)), 1);
  gone.reset();
  const auto again = Compile(kGone);
  again->Enter(base + 3, 1);
  EXPECT_EQ(again->OwnRunId(base + 3), base + 3);
  EXPECT_EQ(again->FirstRunId(base + 3, 1), static_cast<uint32_t>(base + 3));
}

TEST(OccurrenceCounterTest, CountsWithinEachLaunch) {
  OccurrenceCounter counter;
  for (int64_t launch = 0x7ffffff0; launch < 0x80000010; ++launch) {
    const int64_t run_id = static_cast<int32_t>(launch);
    for (uint32_t i = 0; i < 5; ++i) EXPECT_EQ(counter.Count(run_id), i);
  }
}

TEST(OccurrenceCounterTest, RemembersLaunchesThatOverlap) {
  OccurrenceCounter counter;
  for (uint32_t i = 0; i < 4; ++i) {
    for (int64_t run_id = 40; run_id > -20; --run_id) EXPECT_EQ(counter.Count(run_id), i);
  }
  // One stays in its loop while many others come and go.
  for (int64_t run_id = 41; run_id < 4000; ++run_id) {
    EXPECT_EQ(counter.Count(run_id), 0u);
    EXPECT_EQ(counter.Count(7), static_cast<uint32_t>(4 + run_id - 41));
  }
}

TEST(OccurrenceCounterTest, SaysWhatItHasForgotten) {
  OccurrenceCounter counter;
  for (int64_t run_id = 0; run_id < 100; ++run_id) EXPECT_EQ(counter.Count(run_id), 0u);
  EXPECT_EQ(counter.Count(3), std::nullopt);
  EXPECT_EQ(counter.Count(90), 1u);
  for (int64_t run_id = 100; run_id < 100000; ++run_id) EXPECT_EQ(counter.Count(run_id), 0u);
  EXPECT_EQ(counter.Count(90), std::nullopt);
  EXPECT_EQ(counter.Count(99990), 1u);
}

TEST(SiteRegistryTest, NumbersInstancesWithEqualAttributes) {
  SiteRegistry& registry = SiteRegistry::Get();
  const uint64_t begun = registry.BeginCompilation();
  const auto first = registry.Add(77001);
  const auto second = registry.Add(77001);
  const auto other = registry.Add(77002);
  EXPECT_EQ(second.duplicate, first.duplicate + 1);
  EXPECT_EQ(other.duplicate, 0u);
  // One clock until the executable is complete.
  EXPECT_EQ(first.clock, other.clock);
  registry.EndCompilation(begun, std::nullopt, {});
  const auto next = registry.Add(77001);
  EXPECT_NE(next.clock, first.clock);
  EXPECT_EQ(next.duplicate, first.duplicate + 2);
  // An instance of an older executable runs: the one being compiled stays open.
  registry.CloseExecutable(first.clock.get());
  EXPECT_EQ(registry.Add(77002).clock, next.clock);
  registry.CloseExecutable(next.clock.get());
  const auto last = registry.Add(77002).clock;
  EXPECT_NE(last, next.clock);
  registry.CloseExecutable(last.get());
}

TEST(SiteRegistryTest, KnowsSources) {
  SiteRegistry& registry = SiteRegistry::Get();
  EXPECT_EQ(registry.Source(55), "unknown line");
  registry.SetSource(55, "train.py:42");
  EXPECT_EQ(registry.Source(55), "train.py:42");
}

}  // namespace
}  // namespace jaxfabric
