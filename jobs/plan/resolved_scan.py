"""What a scan measures, with every name looked up: its model, its input, its formulas, its
interventions.

This is the first of three steps from a scan file to a run. `resolve` needs no run directory and
reads no corpus. `jobs.plan.plan` then finds or names the run, and `jobs.run.loop` measures it.
"""

from dataclasses import dataclass
from typing import Any

from headcount.schemas.errors import ScanError
from headcount.schemas.files.manifest import Meanings, fingerprints
from headcount.schemas.fingerprints import fingerprint
from headcount.schemas.plugins import activate
from headcount.schemas.registry import check_docstrings
from headcount.schemas.scans.scan import Scan, in_one_order, run_id
from headcount.workers.inputs import INPUTS
from headcount.workers.inputs.sequences import Sequences
from headcount.workers.interventions import BoundIntervention, bind, needs_partners
from headcount.workers.model.info.description import described
from headcount.workers.model.model_info import ModelInfo
from headcount.workers.provenance.code_fingerprint import code_fingerprint
from headcount.workers.provenance.providers import column_record, entry_record

Records = dict[str, dict[str, Any]]  # what each name computes, its unit and fingerprint


@dataclass(frozen=True)
class ResolvedScan:
    """What a scan measures, whichever run it belongs to."""

    scan: Scan  # the scan with its choices reduced to what this model has
    info: ModelInfo
    sequences: Sequences
    kinds: dict[str, Records]  # the formulas that the scan names, by field of the scan
    inputs: Records
    interventions: Records
    identity: dict[str, Any]  # what rows mean: scan, model, corpus, tokenizer; not the code
    code: str  # fingerprint of the code that runs here
    fingerprint: str  # of the scan as it was written, which names its run

    def run_id(self, name: str) -> str:
        """The id of the run of a scan of this name."""
        return run_id(name, self.fingerprint)

    @property
    def records(self) -> dict[str, Records]:
        """The description of every name, by field, according to the code here."""
        return {**self.kinds, "inputs": self.inputs, "interventions": self.interventions}

    @property
    def meanings(self) -> Meanings:
        """The fingerprint of every name, by field, according to the code here."""
        return fingerprints(self.records)


def check_scan(scan: Scan) -> list[BoundIntervention]:
    """Refuse mistakes that need neither the model nor the corpus; returns the interventions."""
    check_docstrings()
    if passed := [each.name for each in scan.plugins if each.functions]:
        raise ScanError(
            f"plugins: {passed[0]} is a function, and a run keeps files; write it to a file and "
            'name that: plugins = ["my_heads.py"]'
        )
    if scan.plugins:
        # A scan without plug-ins does not wait for what tries them.
        from headcount.workers.plugin_proof import check_plugins

        check_plugins(scan.plugins, scan.engine)
    activate(scan.plugins)
    interventions = [bind(intervention) for intervention in scan.interventions]
    family = INPUTS.named(scan.input.family, "input.family")
    family.check(scan.input.options)
    for bound in interventions:
        if bound.needs_partner and family.partner is None:
            have = ", ".join(sorted(other.name for other in INPUTS.values() if other.partner))
            raise ScanError(
                f"interventions: '{bound.intervention}' takes something from the run on partner "
                f"sequences, and the family {family.name} has none; families with partners: {have}"
            )
        if bound.needs_labels and not family.labels_tokens:
            have = ", ".join(sorted(other.name for other in INPUTS.values() if other.labels_tokens))
            raise ScanError(
                f"interventions: '{bound.intervention}' reads which tokens are labelled, and the "
                f"family {family.name} labels none; families that label tokens: {have}"
            )
    return interventions


def resolve(scan: Scan, info: ModelInfo | None = None) -> ResolvedScan:
    """Look up everything that a scan names; every mistake that shows there is an error now.

    `info` describes the scan's model if it is known already: to hash its weights takes seconds.
    """
    interventions = check_scan(scan)
    if info is None:
        info = described(scan)
    written = scan.for_model(info)
    scan_of_model = written.model_copy(update={"bos": info.begins_with_bos(scan.bos)})
    # Whether an intervention fits depends on the model: a layer or a head may not exist.
    for intervention in interventions:
        intervention.check(info, scan_of_model.n_ctx)
        intervention.check_measured(scan_of_model.depth(info))
    sequences = Sequences(scan_of_model, info, partners=needs_partners(scan_of_model.interventions))
    family = sequences.family

    # Options that the scan leaves out count with their defaults: a scan that spells a default out
    # measures the same.
    input_record = {"family": scan_of_model.input.family, **in_one_order(sequences.options)}
    identity = {
        "scan": scan_of_model.record | {"input": input_record},
        "model": info.identity,
        "corpus": sequences.record,
    }
    # Random tokens are the same whichever tokenizer names them.
    if sequences.reads_text:
        identity["tokenizer"] = sequences.tokenizer.fingerprint

    # An intervention such as `a+b(1,2)` has several parts; each is described by itself.
    bound = {
        part.registered.name: entry_record(part.registered, fingerprint(*part.registered.code))
        for intervention in interventions
        for part in intervention.parts
    }
    kinds = {
        kind.field: {
            formula.name: column_record(formula) for formula in scan_of_model.formulas(kind)
        }
        for kind in scan_of_model.kinds()
    }
    return ResolvedScan(
        scan=scan_of_model,
        info=info,
        sequences=sequences,
        kinds=kinds,
        inputs={family.name: entry_record(family, family.fingerprint)},
        interventions=bound,
        identity=identity,
        code=code_fingerprint(),
        fingerprint=written.fingerprint_for(info.begins_with_bos("auto")),
    )
