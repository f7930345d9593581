"""What a report says of how far its numbers can be believed, in English and Chinese."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

TRUST_TEXTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "trust": ("Can this be believed?", "结果可信吗？"),
        "trust_missing": (
            "This split was evaluated without the statistics. Evaluate it again: {command}",
            "该数据段评估时未计算统计量。请重新评估：{command}",
        ),
        # The verdict: what may be said, then the numbers it rests on.
        "verdict_better": (
            "Better than {baseline} at these costs, also after counting {tried}",
            "在当前成本下优于{baseline}，计入{tried}后依然成立",
        ),
        "verdict_undeflated": (
            "Ahead of {baseline} at these costs, but not after counting {tried}",
            "在当前成本下领先{baseline}，但计入{tried}后不再成立",
        ),
        "verdict_uncounted": (
            "Ahead of {baseline} at these costs, but what was tried before is not known, so "
            "nothing is claimed",
            "在当前成本下领先{baseline}，但此前的尝试次数未知，因此不作任何宣称",
        ),
        "verdict_worse": ("Worse than {baseline} at these costs", "在当前成本下劣于{baseline}"),
        "verdict_same": (
            "Indistinguishable from {baseline} at these costs",
            "在当前成本下与{baseline}无法区分",
        ),
        "verdict_valid": (
            "This window chose the checkpoints; nothing can be claimed from it",
            "检查点由该区间选出，不能据此作任何宣称",
        ),
        "verdict_train": (
            "The agents learned on this window; nothing can be claimed from it",
            "智能体在该区间上训练，不能据此作任何宣称",
        ),
        "verdict_few": (
            "Too few bars to say anything: {bars}, where at least {least} are needed.",
            "K 线太少，无法下结论：仅 {bars} 根，至少需要 {least} 根。",
        ),
        "verdict_alone": (
            "Nothing can be said: {baseline} was not run on this window (eval.baselines).",
            "无法下结论：该区间未运行{baseline}（eval.baselines）。",
        ),
        "difference_is": (
            "{verdict}: the difference of Sharpe ratios is {estimate} a year, 95 % interval {low} "
            "to {high}.",
            "{verdict}：年化夏普比率之差为 {estimate}，95 % 区间 {low} 至 {high}。",
        ),
        "difference_to": (
            "{verdict}: the difference of Sharpe ratios to {baseline} is {estimate} a year, 95 % "
            "interval {low} to {high}.",
            "{verdict}：与{baseline}的年化夏普比率之差为 {estimate}，95 % 区间 {low} 至 {high}。",
        ),
        "difference_bare": (
            "{verdict}: the difference of Sharpe ratios is {estimate} a year, and cannot be given "
            "an interval.",
            "{verdict}：年化夏普比率之差为 {estimate}，无法给出区间。",
        ),
        "tried_n": ("the {n} configurations tried", "所尝试的 {n} 组配置"),
        "tried_one": ("the one configuration tried", "所尝试的 1 组配置"),
        "tried_some": ("the configurations tried", "所尝试的配置"),
        "looks_n": ("the {n} looks at these test windows", "对这些测试区间的 {n} 次查看"),
        "looks_one": ("the one look at these test windows", "对这些测试区间的 1 次查看"),
        # Differences.
        "differences": ("Sharpe ratio less that of each baseline", "夏普比率与各基准策略之差"),
        "differences_note": (
            "A year. The interval says how the difference would vary on other days like these, for "
            "these agents: dates are resampled in blocks, the same for agents and baseline "
            "(studentised stationary bootstrap, {replications:,} draws). The verdict takes the "
            "wider of both block lengths. An interval across 0 leaves it open who is better.",
            "年化值。区间表示同一批智能体在类似的其他日期上差异会如何波动：按块重抽日期，"
            "智能体与基准使用相同日期（学生化平稳自助法，{replications:,} 次）。"
            "结论取两种块长中较宽的区间。区间跨过 0 即无法判断孰优。",
        ),
        "differences_none": (
            "Too few bars to resample: {bars}, where at least {least} are needed.",
            "K 线太少，无法重抽样：仅 {bars} 根，至少需要 {least} 根。",
        ),
        "differences_alone": ("No baseline was run on this window.", "该区间未运行基准策略。"),
        "difference": ("Difference", "差值"),
        "baseline": ("Baseline", "基准策略"),
        "interval_95": ("95 % interval", "95 % 区间"),
        "interval_double": ("at twice the blocks", "块长加倍"),
        "block": ("block, bars", "块长（根）"),
        "no_error": (
            "There is a difference, but no error to measure it by.",
            "存在差异，但没有可用的误差估计。",
        ),
        "range": ("{low} to {high}", "{low} 至 {high}"),
        "sharpe_less": ("Difference of Sharpe ratios, a year", "年化夏普比率之差"),
        # Chance and search.
        "search": ("Chance and search", "偶然与搜索"),
        "psr": ("Probabilistic Sharpe ratio", "概率夏普比率（PSR）"),
        "psr_said": (
            "Probability that the true Sharpe ratio is above 0, given the length of the record and "
            "the skew and fat tails of its returns. What was tried is not counted.",
            "考虑样本长度、收益偏度与厚尾后，真实夏普比率大于 0 的概率；未计入尝试次数。",
        ),
        "dsr": ("Deflated Sharpe ratio", "去膨胀夏普比率（DSR）"),
        "dsr_said_valid": (
            "Probability that it is above {hurdle} a year, which the best of {n} configurations "
            "without skill is expected to show by chance.",
            "真实夏普比率高于 {hurdle}（年化）的概率；{n} 组毫无能力的配置中最好的一组，"
            "仅凭偶然预期即可达到该值。",
        ),
        "dsr_said_test": (
            "Probability that it is above {hurdle} a year, which the best of {n} looks at this "
            "window is expected to show by chance without skill.",
            "真实夏普比率高于 {hurdle}（年化）的概率；毫无能力时，对该区间的 {n} "
            "次查看中最好的一次，仅凭偶然预期即可达到该值。",
        ),
        "dsr_said_one": (
            "One trial: there is nothing to deflate, so it is the line above.",
            "仅一次尝试，无需去膨胀，与上一行相同。",
        ),
        "dsr_effective": ("Deflated, effective trials", "DSR（有效次数）"),
        "dsr_effective_said": (
            "The same with {n} effective trials: trials that move alike count in part.",
            "以 {n} 次有效尝试计算：走势相近的尝试只部分计入。",
        ),
        "dsr_chosen": ("Deflated on validation", "验证集上的 DSR"),
        "dsr_chosen_said": (
            "Deflated Sharpe ratio of the validation window, which chose. A claim needs more than "
            "{above}.",
            "作出选择的验证区间上的去膨胀夏普比率。作出宣称须高于 {above}。",
        ),
        "dsr_chosen_none": (
            "Not known. Evaluate the validation window first, then this one again.",
            "未知。请先评估验证集，再重新评估该区间。",
        ),
        "trials": ("Configurations tried", "尝试的配置数"),
        "trials_said": (
            "{n} effective. Compared on days of this window by all runs in this folder, ablations "
            "included (registry of runs); the seeds of a configuration are one trial.",
            "其中有效 {n} 次。同一文件夹内所有运行（含消融实验）在该区间日期上比较过的配置"
            "（见运行登记）；同一配置的各个种子只算一次尝试。",
        ),
        "looks": ("Looks at this test window", "测试区间查看次数"),
        "looks_said": (
            "By {runs}, {n} effective. Each was written down before the window was opened, and "
            "each further one makes a good result by chance more likely.",
            "来自 {runs}，有效 {n} 次。每次均在打开数据之前登记；多看一次，"
            "偶然得到好结果的可能性就更大。",
        ),
        "runs_n": ("{n} runs", "{n} 个运行"),
        "runs_one": ("one run", "1 个运行"),
        "overlap": ("Chosen on these days", "以此区间作选择的配置"),
        "overlap_said": (
            "Configurations of this folder whose validation window overlaps this test window: to "
            "them it was not unseen.",
            "同一文件夹中验证区间与该测试区间重叠的配置：对它们而言，这段数据并非未见。",
        ),
        "pbo": ("Probability of backtest overfitting", "回测过拟合概率（PBO）"),
        "pbo_said": (
            "How often the configuration that is best on half of the days comes out at the median "
            "or below on the other half, of {n}. Were none better than another: {low} to {high} "
            "(95 %); below that, the search found something that lasts.",
            "在 {n} 组配置中，一半日期上最好的配置在另一半日期上落到中位数或以下的频率。"
            "若各配置并无优劣之分，应为 {low} 至 {high}（95 %）；"
            "低于此范围说明搜索找到了持久的东西。",
        ),
        "pbo_few": (
            "Needs {least} configurations on the same days; there are {n}.",
            "需要在相同日期上有 {least} 组配置；目前为 {n} 组。",
        ),
        "spa": ("Superior predictive ability, p-value", "优越预测能力检验（SPA）p 值"),
        "spa_said": (
            "Probability that the best of {n} trials would be this far ahead of {baseline} in mean "
            "return if none of them were better.",
            "若 {n} 次尝试均不优于{baseline}，其中最好的一次平均收益仍如此领先的概率。",
        ),
        "spa_few": (
            "Needs at least two trials with different returns on the same days; {n} counted.",
            "需要在相同日期上至少有两次收益不同的尝试；目前计 {n} 次。",
        ),
        "few_bars": (
            "Too few bars: {bars}, where at least {least} are needed.",
            "K 线太少：仅 {bars} 根，至少需要 {least} 根。",
        ),
        "no_variance": (
            "The returns do not vary, so there is no Sharpe ratio.",
            "收益没有波动，夏普比率不存在。",
        ),
        # Seeds and costs.
        "trust_seeds": ("Over {n} seeds", "{n} 个种子"),
        "trust_seed": ("Over seeds", "种子"),
        "seeds_t": (
            "How the mean would vary with other seeds on the same days: Student's t over {n} "
            "seeds.",
            "同一日期下更换种子时均值的波动：{n} 个种子的 t 区间。",
        ),
        "seeds_bootstrap": (
            "How the mean would vary with other seeds on the same days: studentised bootstrap over "
            "{n} seeds.",
            "同一日期下更换种子时均值的波动：{n} 个种子的学生化自助法区间。",
        ),
        "seeds_none": (
            "One seed: there is no interval, and how much depends on chance in training cannot be "
            "seen. Train more of them (--seeds 5).",
            "仅 1 个种子：没有区间，看不出训练的偶然性有多大。请训练更多种子（--seeds 5）。",
        ),
        "no_number": (
            "At least one seed has no finite value.",
            "至少有一个种子没有有限值。",
        ),
        "mean": ("Mean", "均值"),
        "iqm": ("IQM", "四分位均值"),
        "iqm_said": (
            "Interquartile mean, of the middle half of the seeds: single lucky or failed ones do "
            "not move it.",
            "四分位均值（IQM）：中间一半种子的均值，不受个别偶然过好或失败的种子影响。",
        ),
        "sweep": ("At other costs", "不同成本下"),
        "sweep_note": (
            "The same agents at no costs, at those configured and at twice them; each decides "
            "anew. Small: 95 % interval over the seeds.",
            "同一批智能体在零成本、设定成本与双倍成本下的结果（重新决策）。小字为种子间 95 % "
            "区间。",
        ),
        "sweep_note_one": (
            "The same agent at no costs, at those configured and at twice them; it decides anew.",
            "同一智能体在零成本、设定成本与双倍成本下的结果（重新决策）。",
        ),
        "sweep_folds": (
            "Mean over the folds, at no costs, at those configured and at twice them; the agents "
            "decide anew.",
            "各折均值：零成本、设定成本与双倍成本（智能体重新决策）。",
        ),
        "cost_factor": ("Costs", "成本"),
    }
)
