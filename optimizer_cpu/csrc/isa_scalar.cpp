#include "simd_scalar.h"
// The body compiles over whichever Simd came before it.
#include "kernels_body.h"

namespace optimizer_cpu {
extern const KernelTable kScalarTable;
const KernelTable kScalarTable = make_table("scalar");
}  // namespace optimizer_cpu
