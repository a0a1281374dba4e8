#include "csrc/attention/sm90/backward/instance.cuh"

namespace jaxmagi::sm90 {

const BackwardKernel kBackwardD192 = BackwardInstance<192, 192, 64, 96, 3, 2, 1>::kKernel;

}  // namespace jaxmagi::sm90
