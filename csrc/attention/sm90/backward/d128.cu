#include "csrc/attention/sm90/backward/instance.cuh"

namespace jaxmagi::sm90 {

const BackwardKernel kBackwardD128 = BackwardInstance<128, 128, 80, 128, 2, 2, 2>::kKernel;

}  // namespace jaxmagi::sm90
