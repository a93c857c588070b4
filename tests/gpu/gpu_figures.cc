#include "gpu_figures.h"

#include <algorithm>
#include <cstdio>
#include <sstream>

namespace jaxfabric::testing {
namespace {

// What nccl-tests counts for an op, times bytes/time.
double BusFactor(const Row& row) {
  const double others = static_cast<double>(row.ranks - 1) / row.ranks;
  if (row.op == "all_reduce") return 2 * others;
  if (row.op == "permute" || row.op == "broadcast") return 1;
  return others;
}

const Row* Find(const Figures& figures, const char* op, int ranks, int gpus, uint64_t bytes) {
  for (const Row& row : figures.rows) {
    if (row.op == op && row.ranks == ranks && row.gpus == gpus && row.bytes == bytes) return &row;
  }
  return nullptr;
}

std::string SizeText(uint64_t bytes) {
  if (bytes >= 1 << 20) return std::to_string(bytes >> 20) + " MiB";
  if (bytes >= 1 << 10) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

const char* Verdict(const Figures& figures, const Target& target) {
  if (figures.fake) return "emulated: means nothing";
  if (target.measured == 0) return "NOT RUN on this machine";
  return target.met() ? "met" : "MISSED";
}

}  // namespace

double Figures::Bound(const Row& row) const {
  if (row.gpus != 1) return 0;
  return launch_floor + static_cast<double>(row.traffic) * row.ranks / memory_bandwidth;
}

double Figures::TwoShotBound(const Row& row) const {
  return launch_floor + 3 * (Bound(row) - launch_floor);
}

std::vector<Target> Targets(const Figures& figures) {
  std::vector<Target> targets;
  const auto time = [&](const char* what, double limit, int ranks, int gpus, uint64_t bytes) {
    const Row* row = Find(figures, "all_reduce", ranks, gpus, bytes);
    targets.push_back({what, limit, row == nullptr ? 0 : row->time});
  };
  time("1 GPU, all_reduce of 8 KiB on 4 ranks", 8, 4, 1, 8 << 10);
  time("1 GPU, all_reduce of 1 MiB on 4 ranks", 20, 4, 1, 1 << 20);
  Target share{"1 GPU, two-shot all_reduce of 64 MiB on 4 ranks, of what it moves", 80, 0, true,
               "%"};
  if (const Row* row = Find(figures, "all_reduce", 4, 1, 64 << 20);
      row != nullptr && row->kernel.find("two_shot") != std::string::npos) {
    share.measured = 100 * figures.TwoShotBound(*row) / row->time;
  }
  targets.push_back(share);
  targets.push_back(
      {"1 GPU, to queue a call rather than an empty kernel", 3,
       figures.host_call == 0 ? 0 : std::max(figures.host_call - figures.host_empty, 1e-3)});
  targets.push_back({"set-up of a communicator", 100, figures.setup / 1000, false, "ms"});
  time("8 GPUs, all_reduce of 24 KiB", 6, 8, 8, 24 << 10);
  time("8 GPUs, all_reduce of 256 KiB", 10, 8, 8, 256 << 10);
  time("8 GPUs, all_reduce of 1 MiB", 14, 8, 8, 1 << 20);
  const Row* large = Find(figures, "all_reduce", 8, 8, 64 << 20);
  targets.push_back({"8 GPUs, all_reduce of 64 MiB, of the time that NCCL takes", 100,
                     large == nullptr || large->nccl == 0 ? 0 : 100 * large->time / large->nccl,
                     false, "%"});
  return targets;
}

void Print(const Figures& figures) {
  std::printf("%s%s\n", figures.fake ? "EMULATED, the figures mean nothing: " : "",
              figures.gpu.c_str());
  std::printf("%-44s %8.0f GB/s\n", "memory, read and written by a large copy",
              figures.memory_bandwidth / 1000);
  std::printf("%-44s %8.2f us\n", "empty kernel in a graph", figures.launch_floor);
  std::printf("%-44s %8.2f us\n", "call of one rank in a graph", figures.replay_alone);
  std::printf("%-44s %8.2f us\n", "to queue an empty kernel", figures.host_empty);
  std::printf("%-44s %8.2f us\n", "to queue a call", figures.host_call);
  std::printf("%-44s %8.2f us\n", "set-up of a communicator", figures.setup);
  std::printf("%-44s %s\n", "NCCL", figures.nccl.c_str());
  std::printf("\nbound: a launch, and every rank's arrays once through the GPU's memory\n");
  std::printf("%4s %5s %-18s %10s %10s %9s %6s %8s %8s %9s  %s\n", "GPUs", "ranks", "op", "bytes",
              "us", "bound us", "of it", "algbw", "busbw", "NCCL us", "kernel");
  for (const Row& row : figures.rows) {
    const double bound = figures.Bound(row);
    const double algorithm = static_cast<double>(row.bytes) / row.time / 1000;
    char bounds[32] = "        -      -";
    if (bound > 0) {
      std::snprintf(bounds, sizeof(bounds), "%9.2f %5.0f%%", bound, 100 * bound / row.time);
    }
    char nccl[32] = "-";
    if (row.nccl > 0) std::snprintf(nccl, sizeof(nccl), "%.2f", row.nccl);
    std::printf("%4d %5d %-18s %10s %10.2f %s %8.2f %8.2f %9s  %s\n", row.gpus, row.ranks,
                row.op.c_str(), SizeText(row.bytes).c_str(), row.time, bounds, algorithm,
                algorithm * BusFactor(row), nccl, row.kernel.c_str());
  }
  std::printf(
      "\n\"of what it moves\": of the time for all its loads and stores, three times its arrays\n");
  std::printf("%-72s %9s %12s\n", "aim", "limit", "measured");
  int met = 0, run = 0;
  const std::vector<Target> targets = Targets(figures);
  for (const Target& target : targets) {
    char measured[32] = "-";
    if (target.measured > 0) {
      std::snprintf(measured, sizeof(measured), "%.2f %s", target.measured, target.unit.c_str());
    }
    std::printf("%-72s %6.0f %-2s %12s  %s\n", target.what.c_str(), target.limit,
                target.unit.c_str(), measured, Verdict(figures, target));
    run += target.measured > 0;
    met += target.measured > 0 && target.met();
  }
  if (figures.fake) {
    std::printf("SUMMARY: emulated, no figures\n");
  } else {
    std::printf("SUMMARY: %d of %d aims met, %d not run\n", met, run,
                static_cast<int>(targets.size()) - run);
  }
}

std::string ToJson(const Figures& figures) {
  std::ostringstream out;
  out << "{\"fake\": " << (figures.fake ? "true" : "false") << ", \"gpu\": \"" << figures.gpu
      << "\",\n \"memory_gb_per_s\": " << figures.memory_bandwidth / 1000
      << ", \"empty_kernel_us\": " << figures.launch_floor
      << ", \"one_rank_us\": " << figures.replay_alone
      << ", \"queue_empty_us\": " << figures.host_empty
      << ", \"queue_call_us\": " << figures.host_call << ", \"setup_us\": " << figures.setup
      << ",\n \"calls\": [";
  const char* separator = "\n  ";
  for (const Row& row : figures.rows) {
    out << separator << "{\"op\": \"" << row.op << "\", \"kernel\": \"" << row.kernel
        << "\", \"gpus\": " << row.gpus << ", \"ranks\": " << row.ranks
        << ", \"bytes\": " << row.bytes << ", \"us\": " << row.time
        << ", \"bound_us\": " << figures.Bound(row) << ", \"nccl_us\": " << row.nccl << "}";
    separator = ",\n  ";
  }
  out << "],\n \"aims\": [";
  separator = "\n  ";
  for (const Target& target : Targets(figures)) {
    const char* verdict = figures.fake || target.measured == 0 ? "null"
                          : target.met()                       ? "true"
                                                               : "false";
    out << separator << "{\"what\": \"" << target.what << "\", \"limit\": " << target.limit
        << ", \"unit\": \"" << target.unit << "\", \"measured\": " << target.measured
        << ", \"met\": " << verdict << "}";
    separator = ",\n  ";
  }
  out << "]}\n";
  return out.str();
}

}  // namespace jaxfabric::testing
