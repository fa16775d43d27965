"""The formula sheet: what its examples take."""

from xtrain.plan import ACCELERATORS, LINKS, ModelShape

from ...values import VALUES

VALUES["llama_8b"] = ModelShape.preset("llama-3-8b")
VALUES["h100"] = ACCELERATORS["h100"]
VALUES["nvlink"], VALUES["ndr"] = LINKS["nvlink4"], LINKS["infiniband-ndr"]
