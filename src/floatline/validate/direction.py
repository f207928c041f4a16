"""Which way a metric is better: as the user says, or lower where its name does not say otherwise."""

from __future__ import annotations

import re

from floatline.errors import ComparisonError

# Names of metrics that are better when higher. Comparing one the wrong way round would pass what is worse.
HIGHER = re.compile(
    r"acc(uracy)?|au(ro)?c|m?ap|m?iou|dice|f1|f_?score|hmean|bleu|rouge|meteor|cider|recall|precision|ndcg|mrr|hits?|hr|"
    r"psnr|ssim|r2|rewards?|score|top\d|em|correct|spearman|pearson|kappa|mcc"
)
LOWER = re.compile(r"loss|err(or)?|wer|cer|mse|mae|rmse|nll|ppl|perplexity|fid")


def settle_direction(metric: str, higher_is_better: bool | None) -> bool:
    """Whether higher is better; a name that reads like such a metric is not decided for the user.

    Raises:
        ComparisonError: Nothing was said, and the name reads like a metric that is better when higher.
    """
    if higher_is_better is not None:
        return higher_is_better
    words = re.split(r"[^a-z0-9]+", metric.lower())
    if any(map(HIGHER.fullmatch, words)) and not any(map(LOWER.fullmatch, words)):
        raise ComparisonError(
            f"Metric '{metric}' reads like one that is better when higher. Say --higher-is-better or --lower-is-better."
        )
    return False
