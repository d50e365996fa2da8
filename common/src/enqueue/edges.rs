//! The edges among new jobs: checked, and noted at the jobs that others wait for.

use std::collections::{BTreeSet, HashMap, HashSet};

use bson::Document;

use super::invalid_graph::{InvalidGraph, MOST_EDGES, MOST_JOBS};
use crate::{
    base::JobId,
    job::{Edge, edges_of, line_of_gate},
    mongo::id_of,
};

/// Checks the edges of new jobs. A job that others wait for gets the field `followed`, so that its end is announced.
///
/// # Errors
/// When jobs wait for each other in a circle, or there are too many jobs or edges.
pub(crate) fn connect(jobs: &mut [Document]) -> Result<(), InvalidGraph> {
    if jobs.len() > MOST_JOBS {
        return Err(InvalidGraph::TooManyJobs { jobs: jobs.len() });
    }
    let ids: HashMap<JobId, usize> = jobs.iter().enumerate().filter_map(|(index, job)| Some((id_of(job)?, index))).collect();
    let mut parents: Vec<Vec<usize>> = Vec::with_capacity(jobs.len());
    for job in jobs.iter() {
        let edges = edges_of(job.get("waits_for"))?;
        check_edges(job, &edges)?;
        parents.push(edges.iter().filter_map(|edge| ids.get(&edge.job).copied()).collect());
    }
    parents_first(&parents).map_err(|index| InvalidGraph::Cycle { job: id_of(&jobs[index]).unwrap_or_else(JobId::new) })?;
    for index in parents.into_iter().flatten() {
        jobs[index].insert("followed", true);
    }
    Ok(())
}

/// The jobs that these jobs wait for and that are not among them.
pub(crate) fn outside(jobs: &[Document]) -> Result<Vec<JobId>, InvalidGraph> {
    let ids: HashSet<JobId> = jobs.iter().filter_map(id_of).collect();
    let mut outside = BTreeSet::new();
    for job in jobs {
        let edges = edges_of(job.get("waits_for"))?;
        outside.extend(edges.into_iter().map(|edge| edge.job).filter(|parent| !ids.contains(parent)));
    }
    Ok(outside.into_iter().collect())
}

/// Checks the edges of one new job.
///
/// # Errors
/// When it cannot have them: it is in a line, or has too many, or two to the same job.
pub(crate) fn check_edges(job: &Document, edges: &[Edge]) -> Result<(), InvalidGraph> {
    let id = || id_of(job).unwrap_or_else(JobId::new);
    if !edges.is_empty() && job.get_str("gate").is_ok_and(|gate| line_of_gate(gate).is_some()) {
        return Err(InvalidGraph::Line);
    }
    if edges.len() > MOST_EDGES {
        return Err(InvalidGraph::TooManyEdges { job: id(), edges: edges.len() });
    }
    let mut seen = HashSet::with_capacity(edges.len());
    match edges.iter().find(|edge| !seen.insert(edge.job)) {
        Some(twice) => Err(InvalidGraph::TwoEdges { job: id(), parent: twice.job }),
        None => Ok(()),
    }
}

/// An order in which each job comes after its parents, from the list of parents of each job. Removes jobs without parents until none is left
/// (Kahn, 1962).
///
/// # Errors
/// One of the jobs that wait for themselves.
pub(crate) fn parents_first(parents: &[Vec<usize>]) -> Result<Vec<usize>, usize> {
    let mut open: Vec<usize> = parents.iter().map(Vec::len).collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); parents.len()];
    for (child, parents) in parents.iter().enumerate() {
        for parent in parents {
            children[*parent].push(child);
        }
    }
    let mut order: Vec<usize> = (0..parents.len()).filter(|index| open[*index] == 0).collect();
    let mut next = 0;
    while let Some(parent) = order.get(next) {
        for child in &children[*parent] {
            open[*child] -= 1;
            if open[*child] == 0 {
                order.push(*child);
            }
        }
        next += 1;
    }
    // The others wait for a cycle or are in one. Following the parents that are left ends in one.
    let Some(mut index) = open.iter().position(|left| *left > 0) else { return Ok(order) };
    let mut seen = HashSet::new();
    while seen.insert(index) {
        index = parents[index].iter().copied().find(|parent| open[*parent] > 0).unwrap_or(index);
    }
    Err(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_is_found_and_a_dense_graph_has_none() {
        assert_eq!(parents_first(&[]), Ok(vec![]));
        assert_eq!(parents_first(&[vec![0]]), Err(0));
        assert_eq!(parents_first(&[vec![], vec![0], vec![0, 1]]), Ok(vec![0, 1, 2]));
        assert_eq!(parents_first(&[vec![3], vec![0], vec![1], vec![]]), Ok(vec![3, 0, 1, 2]));
        // 0 waits for the cycle of 1 and 2.
        assert!(matches!(parents_first(&[vec![1], vec![2], vec![1]]), Err(1 | 2)));
        let dense: Vec<Vec<usize>> = (0..400).map(|job| (0..job).collect()).collect();
        assert_eq!(parents_first(&dense), Ok((0..400).collect()));
        let deep: Vec<Vec<usize>> = (0..20_000).map(|job: usize| job.checked_sub(1).into_iter().collect()).collect();
        assert_eq!(parents_first(&deep), Ok((0..20_000).collect()));
    }
}
