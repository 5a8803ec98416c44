#include "simd_neon.h"
// The body compiles over whichever Simd came before it.
#include "kernels_body.h"

namespace optimizer_cpu {
extern const KernelTable kNeonTable;
const KernelTable kNeonTable = make_table("neon");
}  // namespace optimizer_cpu
