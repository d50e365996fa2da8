//! The edges among new jobs: checked, and noted at the jobs that others wait for.

use std::collections::{BTreeSet, HashMap, HashSet};

use bson::Document;

use super::{Edge, InvalidGraph, MOST_EDGES, MOST_JOBS, edges_of};
use crate::{ids::JobId, limits::line_of_gate, store::id_of};

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
    if let Some(index) = first_in_cycle(&parents) {
        return Err(InvalidGraph::Cycle { job: id_of(&jobs[index]).unwrap_or_else(JobId::new) });
    }
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

fn check_edges(job: &Document, edges: &[Edge]) -> Result<(), InvalidGraph> {
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

/// One of the jobs that wait for themselves, from the list of parents of each job. Removes jobs without parents until none is left (Kahn,
/// 1962).
fn first_in_cycle(parents: &[Vec<usize>]) -> Option<usize> {
    let mut open: Vec<usize> = parents.iter().map(Vec::len).collect();
    let mut children: Vec<Vec<usize>> = vec![Vec::new(); parents.len()];
    for (child, parents) in parents.iter().enumerate() {
        for parent in parents {
            children[*parent].push(child);
        }
    }
    let mut free: Vec<usize> = (0..parents.len()).filter(|index| open[*index] == 0).collect();
    while let Some(parent) = free.pop() {
        for child in &children[parent] {
            open[*child] -= 1;
            if open[*child] == 0 {
                free.push(*child);
            }
        }
    }
    // The others wait for a cycle or are in one. Following the parents that are left ends in one.
    let mut index = open.iter().position(|left| *left > 0)?;
    let mut seen = HashSet::new();
    while seen.insert(index) {
        index = parents[index].iter().copied().find(|parent| open[*parent] > 0)?;
    }
    Some(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cycle_is_found_and_a_dense_graph_has_none() {
        assert_eq!(first_in_cycle(&[]), None);
        assert_eq!(first_in_cycle(&[vec![0]]), Some(0));
        assert_eq!(first_in_cycle(&[vec![], vec![0], vec![0, 1]]), None);
        assert_eq!(first_in_cycle(&[vec![3], vec![0], vec![1], vec![]]), None);
        // 0 waits for the cycle of 1 and 2.
        assert!(matches!(first_in_cycle(&[vec![1], vec![2], vec![1]]), Some(1 | 2)));
        let dense: Vec<Vec<usize>> = (0..400).map(|job| (0..job).collect()).collect();
        assert_eq!(first_in_cycle(&dense), None);
        let deep: Vec<Vec<usize>> = (0..20_000).map(|job: usize| job.checked_sub(1).into_iter().collect()).collect();
        assert_eq!(first_in_cycle(&deep), None);
    }
}
