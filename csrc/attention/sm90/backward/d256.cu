#include "csrc/attention/sm90/backward/instance.cuh"

namespace jaxmagi::sm90 {

const BackwardKernel kBackwardD256 = BackwardInstance<256, 256, 64, 64, 2, 2, 1>::kKernel;

}  // namespace jaxmagi::sm90
