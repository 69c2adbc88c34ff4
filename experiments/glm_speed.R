# Processor seconds of one mixed model; called by glm_speed.py.
#
#   Rscript glm_speed.R FILE FAMILY FORMULA LIMIT
#
# Prints the seconds of lme4 and glmmTMB, or the limit with a > before it.
suppressPackageStartupMessages({
  library(lme4)
  library(glmmTMB)
  library(parallel)
})
arguments <- commandArgs(trailingOnly = TRUE)
data <- read.csv(arguments[1])
data$client <- factor(data$client)
link <- switch(arguments[2], gaussian = gaussian(), bernoulli = binomial(), poisson = poisson())
formula <- as.formula(arguments[3])
limit <- as.numeric(arguments[4])

# the first fit of a session compiles R code, which is not part of the time of one fit
invisible(lmer(Reaction ~ Days + (Days | Subject), sleepstudy))
invisible(glmer(cbind(incidence, size - incidence) ~ period + (1 | herd), cbpp, family = binomial))
invisible(glmmTMB(Reaction ~ Days + (Days | Subject), sleepstudy))

processor_seconds <- function(pid) as.numeric(system2("ps", c("-o", "cputimes=", "-p", pid), stdout = TRUE))

seconds <- function(fit) {
  job <- mcparallel({
    start <- proc.time()
    suppressWarnings(suppressMessages(fit()))
    sum((proc.time() - start)[c("user.self", "sys.self")])
  })
  found <- NULL
  while (is.null(found) && processor_seconds(job$pid) < limit) found <- mccollect(job, wait = FALSE, timeout = 0.5)
  if (is.null(found)) {
    tools::pskill(job$pid, tools::SIGKILL)
    mccollect(job)
    return(paste(">", limit))
  }
  if (is.numeric(found[[1]])) signif(found[[1]], 3) else "failed"
}

lme4_fit <- function() if (link$family == "gaussian") lmer(formula, data) else glmer(formula, data, family = link)
cat(seconds(lme4_fit), "\n")
cat(seconds(function() glmmTMB(formula, data, family = link)), "\n")
