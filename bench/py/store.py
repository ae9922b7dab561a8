"""A TCPStore that others use."""
import torch.distributed as dist

import goddpbench

store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
goddpbench.serve(lambda request: {}, ready={"port": [store.port]})
