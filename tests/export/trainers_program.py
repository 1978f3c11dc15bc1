"""Reads exports with the trainers' own code, and trains: `python trainers_program.py STORE POST OUT`, where the trainers are.

STORE has pre_norm, POST the same samples with post_norm. Leaves in OUT the exports, and what was read of them as `.pt` files,
for the tests to hold against what went into the stores.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from hs_connectors import FileTransfer, HiddenStatesBackend
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from safetensors.torch import save_file
from specforge.algorithms.common import dflash_family_data
from specforge.algorithms.eagle3 import data as eagle3_data
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.data.preprocessing import build_offline_eagle3_dataset, process_token_dict_to_mappings
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore, load_feature_file
from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
from specforge.training.controller import TrainerController, TrainerCore
from specforge.training.strategies.base import Eagle3TrainStrategy
from specforge.training.vocab_mapping import count_effective_feature_tokens
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import create_train_val_loaders
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from hsx.cli import main as hsx
from hsx.integrations.specforge import Eagle3Dataset
from hsx.integrations.speculators import HsxTransfer

WIDTH = 32
VOCAB = 300
DRAFT = 60
MAX_LEN = 96
TRAINED = 320
TAUGHT = (0, 4)
"""Rows for SpecForge's model, the short ones: Triton's interpreter takes milliseconds for each token."""
STEPS = 20


def export(store: Path, folder: Path, to: str, *more: str) -> None:
    """`hsx export`."""
    assert hsx(["export", str(store), str(folder), "--to", to, *more]) == 0


def read_specforge(store: Path, post: Path, out: Path) -> None:
    """EAGLE-3: manifest reader with validation, normaliser, collator, older dataset class; the mapping; no export at all."""
    vocabulary = ("--draft-vocab", str(DRAFT), "--vocab-size", str(VOCAB))
    export(store, out / "specforge", "specforge", *vocabulary)
    export(post, out / "specforge-post", "specforge")
    path = str(out / "specforge")
    for name in ("specforge", "specforge-post"):
        refs = _references(out / name)
        raw = [load_feature_file(reference.feature_store_uri.removeprefix("file://")) for reference in refs]
        specs = [{key: (list(spec.shape), str(spec.dtype)) for key, spec in ref.feature_specs.items()} for ref in refs]
        torch.save({"raw": raw, "specs": specs, "paths": [ref.feature_store_uri for ref in refs]}, out / f"{name}.pt")
    normalise = eagle3_data.build_offline_normalizer(MAX_LEN)
    items = [
        normalise(load_feature_file(ref.feature_store_uri.removeprefix("file://"))) for ref in _references(out / "specforge")
    ]
    older = build_offline_eagle3_dataset(path, max_len=MAX_LEN)
    direct = Eagle3Dataset(store, MAX_LEN)
    collate = eagle3_data.build_offline_collator()
    assert isinstance(collate, DataCollatorWithPadding)
    batches = {
        "loader": collate(items),
        "older": collate([older[row] for row in range(len(older))]),
        "direct": collate([direct[row] for row in range(len(direct))]),
    }
    counts = count_effective_feature_tokens(path, target_vocab_size=VOCAB)
    d2t, t2d = process_token_dict_to_mappings(counts, DRAFT, VOCAB)
    torch.save({**batches, "counts": dict(counts), "d2t": d2t, "t2d": t2d}, out / "specforge-batches.pt")


def _references(folder: Path) -> list[Any]:
    reader = eagle3_data.build_offline_reader(str(folder), run_id="test", ttt_length=1, max_len=MAX_LEN)
    reader.validate_files = True
    return reader.read()  # type: ignore[no-any-return]


def read_dflash(store: Path, out: Path) -> None:
    """DFlash and DSpark: reader with its validation, normaliser, collator."""
    export(store, out / "dflash", "specforge-dflash")
    found = {}
    for name, build, normalise, collator in (
        (
            "dflash",
            dflash_family_data.build_offline_reader,
            dflash_family_data.normalize_offline_sample,
            dflash_family_data.build_collator(),
        ),
        (
            "dspark",
            dflash_family_data.build_dspark_offline_reader,
            dflash_family_data.normalize_dspark_offline_sample,
            dflash_family_data.build_dspark_collator(),
        ),
    ):
        reader = build(name, str(out / "dflash"), run_id="test", ttt_length=1, max_len=MAX_LEN)
        reader.validate_files = True
        paths = [ref.feature_store_uri.removeprefix("file://") for ref in reader.read()]
        found[name] = collator([normalise(load_feature_file(path), MAX_LEN) for path in paths])
    torch.save(found, out / "dflash.pt")


def read_modelopt(store: Path, post: Path, out: Path) -> None:
    """Both kinds of final state, through the dataset (`weights_only=True`) and the collator."""
    found = {}
    for name, source in (("pre_norm", store), ("post_norm", post)):
        export(source, out / f"modelopt-{name}", "modelopt")
        files = sorted(str(path) for path in (out / f"modelopt-{name}").glob("*.pt"))
        dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
        items = [dataset[row] for row in range(len(dataset))]
        ids = [torch.load(path, weights_only=True)["conversation_id"] for path in files]
        found[name] = {"items": items, "batch": EagleOfflineDataCollator(MAX_LEN)(items), "ids": ids}
    torch.save(found, out / "modelopt.pt")


def read_angelslim(store: Path, out: Path) -> None:
    """EAGLE-3 offline: its dataset and collator.

    The packages around them want ray, lm_eval and more when they are imported, for what has nothing to do with data. So those
    are put in place with nothing in them; the modules that read are as they were installed.
    """
    export(store, out / "angelslim", "angelslim")
    installed = str(importlib.metadata.distribution("angelslim").locate_file(""))
    name = "angelslim"
    for part in ("", ".compressor", ".speculative", ".train", ".data", ".dataset_builder"):
        name += part
        package = types.ModuleType(name)
        package.__path__ = [str(Path(installed, *name.split(".")))]
        sys.modules[name] = package
    builder = importlib.import_module(f"{name}.offline_dataset_builder").OfflineLLMDatasetBuilder()
    dataset = builder.build_dataset(str(out / "angelslim"))
    items = [dataset[row] for row in range(len(dataset))]
    files = [str(path.relative_to(out / "angelslim")) for path in dataset.ckpt_files]
    torch.save({"items": items, "files": files, "batch": builder.get_data_collator()(items)}, out / "angelslim.pt")


def read_speculators(store: Path, out: Path) -> None:
    """The dataset with its own files and with the store behind it; the acceptance test; and the vocabulary."""
    export(store, out / "speculators", "speculators", "--draft-vocab", str(DRAFT), "--vocab-size", str(VOCAB))
    export(store, out / "index", "speculators", "--index-only")
    rows = len(get_existing_hidden_state_indices(out / "speculators" / "hidden_states"))
    files = FileTransfer(out / "speculators" / "hidden_states")
    direct = HsxTransfer.of_export(out / "index")
    exported = ArrowDataset(TRAINED, out / "speculators", transfer=files, on_missing="raise")
    unexported = ArrowDataset(TRAINED, out / "index", transfer=direct, on_missing="raise")
    for row in range(rows):
        tokens = exported.data[row]["input_ids"].tolist()
        check_hidden_states(files.get_cached(row), tokens)
        check_hidden_states(direct.get_cached(row), tokens)
    corrupt = find_corrupt_hidden_state_indices(out / "speculators" / "hidden_states", list(range(rows)))
    frequencies = torch.load(out / "speculators" / "token_freq.pt", weights_only=True)
    d2t, t2d = build_vocab_mappings_from_distribution(frequencies, DRAFT, VOCAB)
    torch.save(
        {
            "rows": rows,
            "corrupt": corrupt,
            "beyond": direct.get_cached(rows),
            "files": [files.get_cached(row) for row in range(rows)],
            "exported": [exported[row] for row in range(len(exported))],
            "direct": [unexported[row] for row in range(len(unexported))],
            "lengths": exported.approx_lengths,
            "frequencies": frequencies,
            "d2t": d2t,
            "t2d": t2d,
            "written": {key: np.load(out / "speculators" / f"{key}-{DRAFT}.npy") for key in ("d2t", "t2d")},
            "backends": sorted(HiddenStatesBackend.registry),
            "trained": {
                name: train_speculators(out / folder, transfer, out / f"trained-{name}")
                for name, folder, transfer in (("exported", "speculators", files), ("direct", "index", direct))
            },
        },
        out / "speculators.pt",
    )


def import_speculators(out: Path) -> None:
    """Imports the export, and a folder as speculators itself leaves it, in which one row is another's."""
    assert hsx(["import", str(out / "speculators"), str(out / "imported"), "--from", "speculators"]) == 0
    folder = out / "theirs"
    exported = load_from_disk(out / "speculators")
    theirs = Dataset.from_dict({name: exported.with_format(None)[name] for name in ("input_ids", "loss_mask", "seq_len")})
    theirs.set_format("torch")
    theirs.save_to_disk(folder)
    (folder / "hidden_states").mkdir()
    files = FileTransfer(out / "speculators" / "hidden_states")
    for row in range(len(theirs)):
        save_file(files.get_cached(row if row != 1 else 2), folder / "hidden_states" / f"hs_{row}.safetensors")
    assert hsx(["import", str(folder), str(out / "imported-theirs"), "--from", "speculators", "--layers", "2,4,7"]) == 3


class CpuTrainer(Trainer):  # type: ignore[misc]  # speculators is not there for type checkers
    """speculators' trainer, but for two things that ask for an accelerator.

    It takes the local rank for the number of one, and synchronises one in each step that is profiled, of which step 0 is one.
    """

    def setup_model(self) -> None:
        self.local_rank, self.device_type = torch.device("cpu"), "cpu"
        self.global_step = 1
        super().setup_model()


def draft_layer(**more: Any) -> LlamaConfig:
    """One layer as wide as the store's states; both trainers' drafts are made of it."""
    return LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=TRAINED,
        **more,
    )


def train_speculators(data: Path, transfer: Any, out: Path) -> dict[str, Any]:
    """Trains its EAGLE-3 model with its loaders, its loop and its loss; returns what the model was fed, and the losses."""
    torch.manual_seed(0)
    layer = draft_layer()
    layer._attn_implementation = "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=VOCAB,
            eagle_aux_hidden_state_layer_ids=[2, 4, 7],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
            ),
        )
    ).float()
    with torch.no_grad():  # what a verifier's weights would be loaded into is NaN
        for weight in model.parameters():
            if bool(weight.isnan().any()):
                weight.normal_(0, 0.2)
    training, validation = create_train_val_loaders(
        data_path=str(data),
        total_seq_len=TRAINED,
        hidden_states_dtype=torch.bfloat16,
        transfer=transfer,
        vllm_endpoint="",
        on_missing="raise",
        verifier_name_or_path="",
        request_timeout=None,
        max_retries=0,
        generation_validation_retries=0,
        max_consecutive_generation_failures=1,
        hidden_size=WIDTH,
        num_target_layers=3,
        num_workers=0,
        prefetch_factor=1,
        preprocess=shift_batch,
    )
    fed, losses = Fed(), []

    def note(module: torch.nn.Module, _: Any, given: dict[str, Any], result: Any) -> None:
        fed.add(given)
        if module.training:
            losses.append(float(result[1]))

    model.register_forward_hook(note, with_kwargs=True)
    how = {"loss_config": resolve_loss_config("kl_div", "eager")}
    config = TrainerConfig(
        lr=3e-3,
        num_epochs=STEPS,
        save_path=str(out),
        train_call_kwargs=how,
        val_call_kwargs=how,
        scheduler_type="none",
        checkpoint_freq=STEPS,
        log_freq=10 * STEPS,
    )
    CpuTrainer(model, config, training, validation).run_training()
    return {"losses": losses, "fed": fed.digests, "written": sorted(path.name for path in out.iterdir())}


class Fed:
    """Digests of all tensors that a model was given, one a step."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    def add(self, given: dict[str, Any]) -> None:
        digest = hashlib.sha256()
        for name, value in sorted(given.items()):
            if isinstance(value, torch.Tensor):
                digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
        self.digests.append(digest.hexdigest())


def train_specforge(store: Path, out: Path) -> None:
    """Trains SpecForge's EAGLE-3 model by its loop, on its own loader's batches and on those of the store."""
    refs = [_references(out / "specforge")[row] for row in TAUGHT]
    normalise = eagle3_data.build_offline_normalizer(MAX_LEN)
    collate = eagle3_data.build_offline_collator()
    reader = FeatureDataLoader(
        LocalFeatureStore(), refs=refs, batch_size=len(refs), collate_fn=collate, per_sample_transform=normalise
    )
    loader = DataLoader(Eagle3Dataset(store, MAX_LEN, indices=TAUGHT), batch_size=len(TAUGHT), collate_fn=collate)
    exported = list(reader)
    direct = [
        TrainBatch([str(number)], "eagle3", tensors, {"target_repr": "hidden_state"}) for number, tensors in enumerate(loader)
    ]
    torch.save({"exported": _teach(exported, out), "direct": _teach(direct, out)}, out / "specforge-trained.pt")


def _teach(batches: list[TrainBatch], out: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    config = draft_layer(draft_vocab_size=DRAFT, pad_token_id=0)
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.load_vocab_mapping(str(out / "specforge" / "vocab_mapping" / "vocab_mapping.pt"))
    draft.freeze_embedding()
    draft = draft.to(torch.bfloat16)
    model = OnlineEagle3Model(draft, length=1, attention_backend="sdpa")
    backend = FSDPTrainingBackend(
        ParallelConfig(), optimizer_factory=lambda module: BF16Optimizer(module, lr=3e-3, total_steps=STEPS, warmup_ratio=0)
    )
    backend.prepare_model(model, wrap=False, optimizer_target=draft)
    fed, losses = Fed(), []
    model.register_forward_hook(lambda _, __, given, ___: fed.add(given), with_kwargs=True)

    def note(values: dict[str, Any], _: int) -> None:
        losses.append(values["loss"])

    controller = TrainerController(
        TrainerCore(Eagle3TrainStrategy(model, target_head=_target_head(out)), backend),
        run_id="test",
        output_dir=str(out / "specforge-output"),
        log_interval=1,
        max_steps=STEPS,
        num_epochs=STEPS,
        logger=note,
    )
    controller.fit(batches)
    return {"losses": losses, "fed": fed.digests}


def _target_head(out: Path) -> TargetHead:
    folder = out / "target"
    if not folder.exists():
        folder.mkdir()
        LlamaConfig(hidden_size=WIDTH, vocab_size=VOCAB, num_attention_heads=4).save_pretrained(folder)
        weight = torch.empty(VOCAB, WIDTH).normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
        save_file({"lm_head.weight": weight}, folder / "model.safetensors")
        index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return TargetHead.from_pretrained(str(folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    STORE, POST, OUT = map(Path, sys.argv[1:])
    read_specforge(STORE, POST, OUT)
    read_dflash(STORE, OUT)
    train_specforge(STORE, OUT)
    read_modelopt(STORE, POST, OUT)
    read_angelslim(STORE, OUT)
    read_speculators(STORE, OUT)
    import_speculators(OUT)
    (OUT / "done.json").write_text(json.dumps({"torch": torch.__version__}))
