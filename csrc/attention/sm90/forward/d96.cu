#include "csrc/attention/sm90/forward/instance.cuh"

namespace jaxmagi::sm90 {

const ForwardKernel kForwardD96 = ForwardInstance<96, 96, 3, 112, 80>::kKernel;

}  // namespace jaxmagi::sm90
