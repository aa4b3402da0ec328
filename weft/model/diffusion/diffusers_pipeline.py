"""A pipeline of `diffusers` behind the worker's interface."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from weft.kernels import client_tensor
from weft.model.diffusion import flow
from weft.model.diffusion.families import POOLED_EMBEDS, PipelineFamily, PromptTensors
from weft.model.diffusion.pipeline import KEPT_STATES, checkpoint_tensors, first_latents
from weft.payloads import SIGMAS, TIMESTEPS
from weft.payloads import Tensor as ClientTensor
from weft.plan import DenoiseAdmission
from weft.types import ImageParams

NUM_PROMPTS = 2


class DiffusersImage(NamedTuple):
    """The pipeline's state of an image."""

    params: ImageParams
    prompts: PromptTensors
    """Two rows of the pipeline's tables: of the prompt, and of the negative prompt."""
    timesteps: Tensor
    scale: Tensor
    """The last two are on the device."""
    schedulers: list[Any]
    """The scheduler before step s is at s % KEPT_STATES: a scheduler remembers earlier predictions, and a step that is
    made again needs it as it was."""


class DiffusersPipeline:
    """The pipeline encodes prompts, and makes the steps of many images with one call of the transformer."""

    def __init__(self, family: PipelineFamily, num_slots: int) -> None:
        self.family = family
        self._tables = {
            name: tensor.new_zeros(num_slots, NUM_PROMPTS, *tensor.shape[1:]) for name, tensor in family.blank.items()
        }
        """The encoded prompts of images, by latent slot."""
        # Images are decoded one after the other: the VAE takes more memory than all else.
        family.vae.enable_slicing()

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return self.family.latent_shape

    @property
    def num_bytes(self) -> int:
        """Bytes of all models of the pipeline, and of the encoded prompts."""
        parts = [part for part in self.family.pipeline.components.values() if isinstance(part, torch.nn.Module)]
        return _num_bytes(self._tables.values()) + sum(_num_bytes(part.parameters()) for part in parts)

    def prepare(self, admission: DenoiseAdmission) -> tuple[DiffusersImage, Tensor]:
        params, conditioning, checkpoint = admission.image, admission.conditioning, admission.checkpoint
        family, device = self.family, self.family.device
        schedule = {name: values for name in (SIGMAS, TIMESTEPS) if (values := conditioning.values(name)) is not None}
        scheduler = family.schedule(params.steps, schedule, first=admission.first_step)
        if checkpoint is not None:
            _, *remembered = torch.split(checkpoint_tensors(checkpoint, self.latent_shape).to(device), 1)
            family.recall(scheduler, checkpoint.step, remembered)
        image = DiffusersImage(
            params=params,
            prompts={name: table[admission.slot] for name, table in self._tables.items()},
            timesteps=scheduler.timesteps.to(device),
            scale=torch.tensor(params.guidance_scale, device=device),
            schedulers=[scheduler] * KEPT_STATES,
        )
        for number, embeds in enumerate((conditioning.prompt, conditioning.negative)[: params.passes]):
            if embeds is not None:
                pooled = conditioning.tensor(POOLED_EMBEDS[number])
                sent = self._sent(embeds), None if pooled is None else self._sent(pooled)
                self._place(image, number, family.client_prompt(*sent))
        return image, first_latents(admission, self.latent_shape)

    def encode(self, image: DiffusersImage, number: int) -> None:
        text = image.params.negative_text if number else image.params.prompt_text
        self._place(image, number, self.family.encode(text))

    def denoise_step(
        self, latents: Tensor, images: Sequence[DiffusersImage], starts: Sequence[int], count: int
    ) -> Tensor:
        begun = zip(images, starts, strict=True)
        schedulers = [_copy(image.schedulers[start % KEPT_STATES]) for image, start in begun]
        for i in range(count):
            steps = [start + i for start in starts]
            noise = self._noise(latents, images, steps)
            parts = zip(schedulers, steps, torch.split(noise, 1), torch.split(latents, 1), strict=True)
            latents = torch.cat([_moved(*part) for part in parts])
        for image, start, scheduler in zip(images, starts, schedulers, strict=True):
            image.schedulers[(start + 1) % KEPT_STATES] = scheduler
        return latents

    def remembered(self, image: DiffusersImage, step: int) -> list[Tensor]:
        return self.family.remembered(image.schedulers[step % KEPT_STATES])

    def warm_up(self) -> bool:
        return False

    def decode(self, latents: Tensor) -> Tensor:
        vae = self.family.vae
        scaled = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        images: Tensor = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return images.float()

    def _place(self, image: DiffusersImage, number: int, encoded: PromptTensors) -> None:
        for name, tensor in encoded.items():
            image.prompts[name][number] = tensor[0]

    def _sent(self, tensor: ClientTensor) -> Tensor:
        """Return a client's tensor on the device, without waiting for it."""
        values, device = client_tensor(tensor), self.family.device
        return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)

    def _noise(self, latents: Tensor, images: Sequence[DiffusersImage], steps: Sequence[int]) -> Tensor:
        """Return the guided prediction of the transformer: the noise in latents, or their velocity."""
        passes = images[0].params.passes
        prompts = {
            name: torch.stack([image.prompts[name][number] for number in range(passes) for image in images])
            for name in self._tables
        }
        times = torch.stack([image.timesteps[step] for image, step in zip(images, steps, strict=True)])
        inputs = latents.to(self.family.transformer.dtype).repeat(passes, 1, 1, 1)
        noise = self.family.predict(inputs, times.repeat(passes), prompts).float()
        if passes == 1:
            return noise
        conditional, unconditional = noise.chunk(2)
        return flow.guided(conditional, unconditional, torch.stack([image.scale for image in images]))


def kept_bytes(family: PipelineFamily) -> int:
    """Return the bytes that an image holds besides its latents: its encoded prompts, and its schedulers' memory."""
    solver_order = family.pipeline.scheduler.config.get("solver_order", 0)
    num_remembered = KEPT_STATES - 1 + solver_order if solver_order else 0
    remembered = num_remembered * math.prod(family.latent_shape) * torch.float32.itemsize
    return NUM_PROMPTS * _num_bytes(family.blank.values()) + remembered


def unit_costs(family: PipelineFamily) -> tuple[int, int]:
    """Return the tokens that the encoding of a prompt and the decoding of an image count as: what they take over what a
    denoise step with guidance takes, times the tokens of that. On a GPU, where launches and memory decide, it is time,
    as measured now. On a CPU it is floating-point operations, counted without being computed: they are the same at
    every start, however busy the machine is."""
    on_gpu, latents = family.device.type == "cuda", torch.zeros(NUM_PROMPTS, *family.latent_shape, device=family.device)
    prompts = {name: torch.cat([tensor] * NUM_PROMPTS) for name, tensor in family.blank.items()}
    times = torch.zeros(NUM_PROMPTS, device=family.device)
    with nullcontext() if on_gpu else FakeTensorMode(allow_non_fake_inputs=True):
        step, encode, decode = map(
            _seconds if on_gpu else _num_flops,
            (
                lambda: family.predict(latents.to(family.transformer.dtype), times, prompts),
                lambda: family.encode(""),
                lambda: family.vae.decode(latents[:1].to(family.vae.dtype), return_dict=False),
            ),
        )
    tokens = NUM_PROMPTS * family.num_tokens
    return math.ceil(encode / step * tokens), math.ceil(decode / step * tokens)


@torch.inference_mode()
def _seconds(work: Callable[[], object]) -> float:
    """Return the time that the fastest of a few runs takes the GPU. The first ones choose kernels."""
    seconds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


@torch.inference_mode()
def _num_flops(work: Callable[[], object]) -> float:
    # Attention counts when it is made of products of matrices: not every fused kernel is counted.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


def _copy(scheduler: Any) -> Any:
    """Copy a scheduler. Schedulers replace the tensors that they remember, and never write into them."""
    twin = copy.copy(scheduler)
    for name, value in vars(scheduler).items():
        if isinstance(value, list):
            setattr(twin, name, value.copy())
    return twin


def _moved(scheduler: Any, step: int, noise: Tensor, latents: Tensor) -> Tensor:
    moved: Tensor = scheduler.step(noise, scheduler.timesteps[step], latents, return_dict=False)[0]
    return moved


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
