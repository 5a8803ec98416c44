// Choice of an instruction set from what the processor really has.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace optimizer_cpu {

// Instruction sets compiled into this build, best first.
std::vector<std::string> compiled_isas();
// Those of them that this processor and operating system can run, best first.
std::vector<std::string> supported_isas();
// The table of a supported instruction set; throws std::invalid_argument otherwise, so nothing can raise SIGILL.
const KernelTable& table_of(const std::string& isa);

// Rounding offsets of `compact` for a step, and those that round to nearest.
Dither dither_of_step(std::uint32_t step);
Dither dither_nearest();

}  // namespace optimizer_cpu
