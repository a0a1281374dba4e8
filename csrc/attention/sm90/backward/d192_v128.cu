#include "csrc/attention/sm90/backward/instance.cuh"

namespace jaxmagi::sm90 {

const BackwardKernel kBackwardD192V128 = BackwardInstance<192, 128, 64, 96, 3, 2, 2>::kKernel;

}  // namespace jaxmagi::sm90
