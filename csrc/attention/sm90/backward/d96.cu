#include "csrc/attention/sm90/backward/instance.cuh"

namespace jaxmagi::sm90 {

const BackwardKernel kBackwardD96 = BackwardInstance<96, 96, 64, 128, 2, 3, 2>::kKernel;

}  // namespace jaxmagi::sm90
