//! Shares of groups: which group gets the next start, if groups have weights.
//!
//! This is stride scheduling (Waldspurger and Weihl, 1995). Each start moves its group forward by a stride, which is shorter the larger the
//! weight of the group is. The group that is furthest behind comes next. A group without waiting jobs saves nothing up: when it has jobs
//! again, it continues where the others are.

use std::collections::HashMap;

/// The stride of a group with weight 1.
const STRIDE: f64 = 1e9;
/// Maximum number of groups with a known position. Above it, those that are not ahead of the others are dropped.
const GROUPS: usize = 10_000;

/// A position in the common course of all groups.
pub(crate) type Pass = u128;

/// The positions of groups.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares {
    passes: HashMap<String, Pass>,
    /// The position of the group that was served last.
    served: Pass,
}

impl Shares {
    /// The position of a group. The group with the lowest comes first.
    pub(crate) fn pass(&self, group: &str) -> Pass {
        self.passes.get(group).copied().unwrap_or(0).max(self.served)
    }

    /// Notes a start in the group that is furthest behind, with its weight.
    pub(crate) fn serve(&mut self, group: &str, weight: f64) {
        let pass = self.pass(group);
        self.served = pass;
        if self.passes.len() > GROUPS {
            self.passes.retain(|_, other| *other > pass);
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a weight is from 0.001 to 1000000")]
        self.passes.insert(group.to_owned(), pass + (STRIDE / weight) as Pass);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The starts of each group among `starts`, if these groups always have jobs.
    fn served(shares: &mut Shares, groups: &[(&str, f64)], starts: usize) -> Vec<usize> {
        let mut counts = vec![0; groups.len()];
        for _ in 0..starts {
            let next = (0..groups.len()).min_by_key(|index| shares.pass(groups[*index].0)).expect("there are groups");
            shares.serve(groups[next].0, groups[next].1);
            counts[next] += 1;
        }
        counts
    }

    #[test]
    fn groups_get_starts_in_proportion_to_their_weights() {
        let counts = served(&mut Shares::default(), &[("a", 3.0), ("b", 0.5), ("c", 1.0)], 4_500);
        assert!(counts.iter().zip([3_000_usize, 500, 1_000]).all(|(count, wanted)| count.abs_diff(wanted) <= 3), "{counts:?}");
    }

    #[test]
    fn a_group_that_was_idle_gets_its_share_and_no_more() {
        let mut shares = Shares::default();
        served(&mut shares, &[("a", 1.0)], 1_000);
        assert_eq!(served(&mut shares, &[("a", 1.0), ("b", 1.0)], 100), [50, 50]);
    }
}
