#include "csrc/attention/sm90/backward/instance.cuh"

namespace jaxmagi::sm90 {

const BackwardKernel kBackwardD64 = BackwardInstance<64, 64, 128, 128, 2, 2, 2>::kKernel;

}  // namespace jaxmagi::sm90
